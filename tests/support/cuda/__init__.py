"""The CUDA kernels on the host, and GPUs that are emulated."""
