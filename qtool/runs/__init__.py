"""One run of a command: what was asked, where finished tensors go, what makes it the same run.

request                what was asked; gguf_request.py: into GGUF
resume                 what is finished of an earlier try; gguf_resume.py, gguf_verify.py
each_tensor, by_rows   tensors that stand alone, a matrix some rows at a time
sink                   finished tensors, packed into the planned place
layer_errors, zeros    what is worth telling of them
"""
