"""`qtool quantize` into GGUF."""
