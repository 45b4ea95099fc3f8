"""Tokenizers as the keys of a GGUF file, and back."""
