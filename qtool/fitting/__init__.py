"""`qtool fit`: which type, or how many bits, each matrix gets so that an artifact has a given size.

fit                    from a request to a recipe
slopes, head, sums     what an error in each matrix costs: a pass forwards and one backwards
slope, slopes_file     what that is, and how it is stored
kept                   what of these passes is finished
losses                 what each choice of each matrix loses, as it comes
of_gguf, gguf_losses   types of the tensors in a GGUF file, and what each loses
of_checkpoint          the same of bits in GPTQ, compressed-tensors and MLX
outside                the head and the embedding there
sampled                rows that speak for all of a matrix
costs                  losses in a file, for other sizes
choose, allocate       the cheapest choice that fits into the size
memory                 threads that keep a budget of memory
recipe_text            a recipe that says so, which `quantize` takes like any other
"""
