"""GGUF files, and what becomes of them."""
