"""Rows of `gguf_models.MODELS`, by families of models."""
