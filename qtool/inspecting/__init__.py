"""What `qtool inspect` tells of an artifact of safetensors; of GGUF files qtool.gguf does."""
