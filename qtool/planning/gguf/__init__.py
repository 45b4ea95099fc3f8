"""What will be in a GGUF file: the type of every tensor, the metadata, what that will need."""
