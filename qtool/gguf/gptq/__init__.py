"""GPTQ into GGUF: the sweep chooses codes for the levels that blocks fix."""
