"""A small trained Llama in the Hugging Face layout, so that qtool works without a network."""
