"""Tasks on the GPU: launched on torch's current stream, one after the other.

A launch is programmatic (programmatic dependent launch, CUDA Programming Guide) where the caller
asks for it, who knows that nothing which is still under way writes what the task reads early: see
kernels/cuda/gemv.h. Captured into a graph it is an edge of its own kind, since CUDA 12.3.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
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
    _check_gpu(torch.cuda.current_device())


@cache
def _check_gpu(index: int) -> None:
    """UnsupportedError where GPU or driver take nothing of what NVRTC makes."""
    import torch
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(index)
    gpu = f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})"
    if (major, minor) < _OLDEST:
        raise UnsupportedError(
            f"{gpu}: the kernels need 7.5 (Turing) or later; leave --device out to stay on the CPU"
        )
    made = compiling.compiler_version()
    known = compiling.architectures()
    if known and 10 * major + minor not in known:
        raise UnsupportedError(
            f"{gpu}: NVRTC {made} compiles for none such; install a later one: "
            "pip install --upgrade cuda-bindings nvidia-cuda-nvrtc"
        )
    status, version = driver.cuDriverGetVersion()
    if int(status) == 0 and version // 1000 < int(made.split(".")[0]):
        older = version // 1000
        raise UnsupportedError(
            f"{gpu}: its driver knows CUDA {older}.{version % 1000 // 10}, and NVRTC {made} makes "
            f"code for later ones; install a newer driver, or an older compiler: "
            f"pip install 'cuda-bindings=={older}.*' nvidia-cuda-nvrtc-cu{older}"
        )


_OLDEST = (7, 5)  # compute capability: of tensor cores as products want them
_WITH_EDGES = 12030  # the first version of CUDA whose graphs have them
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


@cache
def overlaps(device: int) -> bool:
    """Whether launches may be programmatic there: from sm_90 on, by a driver of CUDA 12.3 or later
    and cuda-core 0.6 or later, which tells a kernel's handle."""
    import torch
    from cuda.bindings import driver

    old = torch.cuda.get_device_capability(device) < (9, 0)
    if old or not hasattr(compiling.core().Kernel, "handle"):
        return False
    status, version = driver.cuDriverGetVersion()
    return int(status) == 0 and int(version) >= _WITH_EDGES


def _launch_programmatic(stream: int, task: Task, kernel: Any, arguments: list[Any]) -> None:
    """By the driver itself: cuda-core has this since 1.2 only."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*task.blocks, 1)
    config.blockDimX, config.blockDimY, config.blockDimZ = task.threads, 1, 1
    config.sharedMemBytes = task.shared
    config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    (status,) = driver.cuLaunchKernelEx(config, int(kernel.handle), ctypes.addressof(addresses), 0)
    if int(status) != 0:
        said = driver.CUresult(int(status)).name  # some versions print the number alone
        raise RuntimeError(f"{task.kernel}: cuLaunchKernelEx says {said}")


def _with_room(ask: Callable[[], None], kernel: str) -> None:
    """Asks again once torch has given back what it only keeps: a driver sets memory aside for the
    arrays of a kernel's threads, up to a gigabyte, when it is first launched. torch's own
    OutOfMemoryError where that does not help."""
    import torch

    for last in (False, True):
        try:
            return ask()
        except Exception as error:  # of cuda-core, or of _launch_programmatic
            if "OUT_OF_MEMORY" not in str(error):
                raise
            if last:
                said = f"CUDA out of memory at a launch of {kernel}: {error}"
                raise torch.OutOfMemoryError(said) from error
            torch.cuda.empty_cache()


def launch(*tasks: Task, programmatic: bool = False) -> None:
    """Runs tasks, whose arrays are on torch's current device, in order.

    Returns at once, as torch does; torch.OutOfMemoryError as torch has it. The arrays must live
    until the tasks have run; memory that torch gives out again on the same stream is safe.
    programmatic: tasks that wait themselves may begin before what is before them on the stream has
    ended, where a GPU can do that (`overlaps`); what they read early is older than the last launch
    on the stream that is not programmatic.
    """
    import torch

    api, index = compiling.core(), torch.cuda.current_device()
    # Its context is the one that torch uses; what is current is so for a thread.
    api.Device(index).set_current()
    handle = torch.cuda.current_stream().cuda_stream
    stream = api.Stream.from_handle(handle)
    for task in tasks:
        kernel = _kernel(task.kernel, index)
        arguments = [ctypes.c_int32(0), *map(ctypes.c_int64, task.arguments())]
        if programmatic and task.waits and overlaps(index):
            ask = partial(_launch_programmatic, handle, task, kernel, arguments)
        else:
            shape = {"grid": task.blocks, "block": task.threads}
            config = api.LaunchConfig(**shape, shmem_size=task.shared)
            ask = partial(api.launch, stream, config, kernel, *arguments)
        _with_room(ask, task.kernel)
