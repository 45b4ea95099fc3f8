"""`qtool convert`: the numbers of an artifact in another format.

    open -> survey every tensor, refuse or note what is not exact -> stage -> tensor by tensor:
    read, re-pack, write -> read back, dequantize both, compare -> certificate -> final name

A conversion is exact where both files dequantize to the same float32 numbers. What is not exact is
refused before anything is written, or with `lossy` done, measured and recorded. fused.py:
dequantized experts lie as checkpoints of their class have them. view.py: the plain numbers of a
source as they are read, without a copy.
"""
