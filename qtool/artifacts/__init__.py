"""An artifact, or any model, opened for reading: matrices with all that stores them.

artifact.py         tensors by name, their schemes and numbers; entry.py: one of them
stored_config.py    what the JSON of a folder says of it
expert_stack.py     experts in one tensor of MXFP4
cache_scales.py     scales of the KV cache
lost.py             what it has beside its weights, which no conversion carries over
untold.py           matrices that are packed, though no config says so
"""
