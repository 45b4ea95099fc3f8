"""A source as its headers, names and shapes tell it, and views of it; no numbers are read.

checkpoint.py       which tensors there are, in which file, at which bytes; links.py
structure.py        the decoder blocks; roles.py: what each tensor is; names.py: which part of
                    which parameter
fused_experts.py    experts in 3-D tensors, one by one; fused_names.py: and back
padding.py          wider feed-forward layers, found by feed_forward.py
gguf_models.py      the GGUF files at a path; beside.py: adapters and copies beside the weights;
                    front_matter.py: what its model card says
decoder_names.py    a multimodal model, under its decoder's names
"""
