"""A model as GGUF has it: files and their headers, and checkpoints seen as GGUF, and back."""
