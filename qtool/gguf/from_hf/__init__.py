"""A checkpoint as the GGUF file that llama.cpp's converter would write of it."""
