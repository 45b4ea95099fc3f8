"""A forward pass of any decoder with one block of weights in memory at a time.

skeleton.py     the model without its blocks; meta_model.py: transformers' modules without weights
stream.py       hidden states on their way, and the block that they pass; layout.py: as one tensor
outer_forward.py, handed_on.py, arguments.py
                what the model's own loop gives its blocks, and what these hand to later ones
weights.py, reading.py
                what weights are read from, and into torch, some bytes at a time
hidden.py       states on the disk
workers.py, turns.py, single_thread.py, allocator.py
                threads, the order of sums, memory
linears.py, torch_calls.py, online.py
                calls that are seen as they are made, or made otherwise
precision.py    how exactly products are made; in_order.py: numbered work on a few threads
"""
