"""GPTQ into GGUF: codes chosen by the sweep for the levels that blocks fix, block by block."""
