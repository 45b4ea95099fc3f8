"""Tasks on the GPU: launched on torch's current stream, one after the other."""

import ctypes
from functools import cache
from threading import Lock
from typing import Any

from qtool.cuda import compiling
from qtool.cuda.tasks import Task
from qtool.errors import UnsupportedError


def require() -> None:
    """UnsupportedError, in a sentence that says what is missing, where no kernel can run."""
    import torch

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this is a build of PyTorch without CUDA)"
        raise UnsupportedError(
            f"no NVIDIA GPU is here that PyTorch {torch.__version__} can use{built}; "
            "leave --device out to stay on the CPU"
        )
    compiling.core()


_LOADING = Lock()  # compiling takes seconds, and other threads want the same kernel


@cache
def _loaded(name: str, device: int) -> Any:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    code = compiling.cubin(name, f"sm_{major}{minor}")
    return compiling.core().ObjectCode.from_cubin(code).get_kernel(name)


def _kernel(name: str, device: int) -> Any:
    """A kernel, loaded for a device."""
    with _LOADING:
        return _loaded(name, device)


def launch(*tasks: Task) -> None:
    """Runs tasks, whose arrays are on torch's current device, in order.

    Returns at once, as torch does. The arrays must live until the tasks have run; memory that torch
    gives out again on the same stream is safe.
    """
    import torch

    api, index = compiling.core(), torch.cuda.current_device()
    # Its context is the one that torch uses; what is current is so for a thread.
    api.Device(index).set_current()
    stream = api.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    for task in tasks:
        config = api.LaunchConfig(grid=task.blocks, block=task.threads)
        arguments = [ctypes.c_int32(0), *map(ctypes.c_int64, task.arguments())]
        api.launch(stream, config, _kernel(task.kernel, index), *arguments)
