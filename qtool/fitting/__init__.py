"""`qtool fit`: which type, or how many bits, each matrix gets so that an artifact has a given size.

slopes      what an error in each matrix costs, from one pass forwards and one backwards
losses      what each candidate costs: the errors that it makes, by these
allocate    the cheapest choice that fits into the size
recipe_text a recipe that says so, which `quantize` takes like any other
"""
