"""An artifact, or any model, opened for reading: matrices with all that stores them.

artifact.py         tensors by name, their schemes and numbers; entry.py: one of them
stored_config.py    what the JSON of a folder says of it
expert_stack.py     experts in one tensor of MXFP4
opened.py           a model opened from Python
"""
