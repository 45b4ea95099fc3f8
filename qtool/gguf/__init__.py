"""GGUF end to end: from a checkpoint or another GGUF file to the types that llama.cpp loads."""
