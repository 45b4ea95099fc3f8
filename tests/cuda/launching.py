"""Launches through cuda-core, and what a driver is given: run by compile.py, with driver.c's
libcuda.so.1 in LD_LIBRARY_PATH and every kernel compiled in QTOOL_CACHE.

Every case of `qtool bench --device cuda` is launched as on a GPU (qtool.cuda.running), plainly and
programmatically, in this thread and in another. What arrives is compared with the task: kernel,
grid, threads of a block, stream, attributes, and each parameter; and with the cubin: the parameters
that the kernel reads, their sizes and places, and the threads that it was compiled for.
"""

import ctypes
import dataclasses
import struct
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from qtool.benching import cuda as bench
from qtool.benching import cuda_cases as bench_cases
from qtool.cuda import compiling, running
from qtool.cuda.tasks import FIELDS, Task
from qtool.native.library import aligned

STREAMS = [0x5EED, 0]  # of this thread; of the other one: torch's own
SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
TELLS = hasattr(compiling.core().Kernel, "handle")  # since cuda-core 0.6; before: plain
_MAX_THREADS, _PARAMETER = 0x05, 0x17  # EIATTR_* of .nv.info
_NUMBERS, _HALF = 4, 3  # EIFMT_*: a size and as many bytes; two bytes


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is one of many."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{name}_{axis}", ctypes.c_uint) for name in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def sections(code: bytes) -> Iterator[tuple[str, bytes]]:
    """Of an ELF file of 64 bits."""
    (at,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQ", code, at + size * i) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        start = strings + name
        yield code[start : code.index(b"\0", start)].decode(), code[offset : offset + length]


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """What the compiler says of a kernel in .nv.info.NAME."""
    at = 0
    while at < len(info):
        form, what, value = struct.unpack_from("<BBH", info, at)
        at += 4
        length = value if form == _NUMBERS else 0
        yield what, info[at : at + length]
        at += length


def compiled_for(kernel: str) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Threads of a block, at most; number, place and size of each parameter."""
    code = compiling.cubin(kernel, "sm_90")
    info = dict(sections(code))[f".nv.info.{kernel}"]
    threads: list[int] = []
    parameters: list[tuple[int, int, int]] = []
    for what, data in attributes(info):
        if what == _MAX_THREADS:
            threads = list(struct.unpack("<3I", data))
        elif what == _PARAMETER:
            _, number, place, flags = struct.unpack("<IHHI", data)
            parameters.append((number, place, flags >> 18))
    return threads, sorted(parameters)


def check(arrived: dict[str, Any], task: Task, stream: int, programmatic: bool) -> None:
    """What arrived, against the task and the cubin."""
    threads, parameters = compiled_for(task.kernel)
    assert threads == [task.threads, 1, 1], (task.kernel, threads, task.threads)
    wanted = [(0, 0, 4), *((1 + i, 8 + 8 * i, 8) for i in range(len(FIELDS)))]
    assert parameters == wanted, (task.kernel, parameters)
    assert arrived == {
        "kernel": task.kernel,
        "grid": (*task.blocks, 1),
        "block": (task.threads, 1, 1),
        "shared": task.shared,
        "stream": stream,
        "attributes": [(SERIALIZATION, 1)] if programmatic and task.waits and TELLS else [],
        "fields": task.arguments(),
    }, task.kernel


def room(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    array = aligned(shape, np.uint16 if dtype == "bfloat16" else np.dtype(dtype))
    array[...] = 1
    return array


def main() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    found: list[dict[str, Any]] = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(Launch), ctypes.POINTER(ctypes.c_void_p)
    )
    def on_launch(kernel: bytes, at: Any, parameters: Any) -> int:
        given = at.contents
        fields = [ctypes.c_int64.from_address(parameters[1 + i]).value for i in range(len(FIELDS))]
        found.append(
            {
                "kernel": kernel.decode(),
                "grid": (given.grid_x, given.grid_y, given.grid_z),
                "block": (given.block_x, given.block_y, given.block_z),
                "shared": given.shared_bytes,
                "stream": given.stream or 0,
                "attributes": [
                    (one.id, one.value[0]) for one in given.attributes[: given.attribute_count]
                ],
                "fields": fields,
            }
        )
        return 0

    ctypes.c_void_p.in_dll(driver, "qt_on_launch").value = ctypes.cast(
        on_launch, ctypes.c_void_p
    ).value
    arrays = bench_cases.Arrays(room, room, room, room, lambda array: array.copy())
    tasks: list[Task] = []
    kept = []
    for case in bench.cases_named(None):
        work = case.prepare(arrays, 128, 256)
        kept.append(work)
        tasks += work.tasks
    tasks.append(dataclasses.replace(next(task for task in tasks if task.waits), shared=4096))
    main_thread = threading.get_ident()

    def stream() -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=STREAMS[threading.get_ident() != main_thread])

    here = {
        "current_device": lambda: 0,
        "current_stream": stream,
        "get_device_capability": lambda _: (9, 0),
    }
    with mock.patch.multiple("torch.cuda", **here):
        for programmatic in (False, True):
            run = partial(running.launch, *tasks, programmatic=programmatic)
            run()
            other = threading.Thread(target=run)
            other.start()
            other.join()
    assert len(found) == 4 * len(tasks), f"{len(found)} launches of {4 * len(tasks)}"
    for number, arrived in enumerate(found):
        turn = number // len(tasks)
        check(arrived, tasks[number % len(tasks)], STREAMS[turn % 2], turn > 1)
    assert any(task.waits for task in tasks)
    kernels = {task.kernel for task in tasks}
    print(f"cuda-core: {len(found)} launches of {len(kernels)} kernels arrive as they were asked")


if __name__ == "__main__":
    main()
