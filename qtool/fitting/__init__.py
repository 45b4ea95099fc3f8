"""`qtool fit`: which type, or how many bits, each matrix gets so that an artifact has a given size.

fit                    from a request to a recipe
losses                 what each choice of each matrix loses, as it comes, by qtool.gradients
of_gguf, gguf_losses   types of the tensors in a GGUF file, and what each loses
of_checkpoint          the same of bits in GPTQ, compressed-tensors and MLX
outside                the head and the embedding there
costs                  losses in a file, for other sizes
choose, allocate       the cheapest choice that fits into the size
recipe_text            a recipe that says so, which `quantize` takes like any other
"""
