"""The checks of GGUF files."""
