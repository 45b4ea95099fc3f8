"""Kernels for NVIDIA GPUs (kernels/cuda/): the same numbers as the CPU's, bit for bit.

    device       where the work is done, if not on the CPU
    tasks        what a kernel is told, from arrays of numpy or tensors of torch
    compiling    one kernel at a time, by NVRTC through NVIDIA's cuda-core, kept on disk
    running      tensors of torch in, on torch's current stream

Nothing of it but `device` is imported unless a GPU is asked for.
"""
