"""A GGUF file as the checkpoint that it was made of."""
