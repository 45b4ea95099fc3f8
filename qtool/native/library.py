"""Finds and opens the kernel library, chooses its instruction set, and checks what it is given."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

import qtool
from qtool.errors import UnsupportedError

_LIBRARY = "libqtool_kernels.so"
_ROWS_PER_TASK = 32  # a panel on every instruction set, so that threads share no panel


def library_path() -> Path:
    """The shared library: beside the package, or in build/ of a checkout."""
    entries = [Path(entry) for entry in qtool.__path__]
    candidates = [folder / _LIBRARY for e in entries for folder in (e, e / "build")]
    if named := os.environ.get("QTOOL_LIBRARY"):
        candidates = [Path(named)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise UnsupportedError(
            f"the kernel library is not at {' or '.join(map(str, candidates))}; "
            "install the package, or run `make kernels` in a checkout"
        )
    return found


@cache
def library() -> ctypes.CDLL:
    """It, opened."""
    opened = ctypes.CDLL(str(library_path()))
    opened.qt_selected.restype = ctypes.c_char_p
    opened.qt_available.restype = ctypes.c_char_p
    if forced := os.environ.get("QTOOL_SIMD"):
        _select(opened, forced)
    return opened


def _select(opened: ctypes.CDLL, isa: str) -> None:
    if opened.qt_select(isa.encode()) != 0:
        raise UnsupportedError(
            f"instruction set {isa!r} is not available here; "
            f"this machine has {', '.join(_available(opened))}"
        )


def _available(opened: ctypes.CDLL) -> list[str]:
    names: list[str] = []
    while (name := opened.qt_available(len(names))) is not None:
        names.append(name.decode())
    return names


def available() -> list[str]:
    """Instruction sets of this machine that the library was built for, the best one last."""
    return _available(library())


def selected() -> str:
    """The instruction set in use."""
    name: bytes = library().qt_selected()
    return name.decode()


def select(isa: str) -> None:
    """Uses this instruction set from now on; UnsupportedError where it is not available."""
    _select(library(), isa)


def default_threads() -> int:
    """The cores this process may run on, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check(
    name: str, array: NDArray[Any], dtype: DTypeLike, shape: Sequence[int | None]
) -> NDArray[Any]:
    """The array itself, if it is C-contiguous and of this dtype and shape (None: any length)."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is {type(array).__name__}, expected a numpy array")
    if array.dtype != np.dtype(dtype):
        raise TypeError(f"{name} is {array.dtype}, expected {np.dtype(dtype)}")
    wanted = tuple("any" if n is None else n for n in shape)
    if len(shape) != array.ndim or any(
        n is not None and n != have for n, have in zip(shape, array.shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {array.shape}, expected {wanted}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    return array


def address(array: NDArray[Any] | None, row: int = 0) -> int | None:
    """Address of a row of a contiguous array."""
    return None if array is None else array.ctypes.data + row * array.strides[0]


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An uninitialized array that begins at a cache line: no vector of it lies across two."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(size + 64, np.uint8)
    begin = -room.ctypes.data % 64
    return room[begin : begin + size].view(dtype).reshape(shape)


@cache
def _helpers() -> ThreadPoolExecutor:
    """Threads beside the caller's, which stay: to start them costs as much as a small matrix."""
    return ThreadPoolExecutor(max(64, default_threads()), thread_name_prefix="qtool-kernels")


if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads
    os.register_at_fork(after_in_child=_helpers.cache_clear)


def over_rows(
    rows: int,
    threads: int | None,
    run: Callable[[int, int], int],
    refused: str = "the kernel library refused an argument",
) -> None:
    """Calls run(first, last) on ranges that cover the rows; its result is an error code.

    Ranges begin at multiples of 32; the caller's thread takes the first. MemoryError, or ValueError
    with `refused`.
    """
    threads = threads or default_threads()
    panels = -(-rows // _ROWS_PER_TASK)
    count = max(1, min(threads, panels))
    edges = [min(rows, panels * k // count * _ROWS_PER_TASK) for k in range(count + 1)]
    others = [_helpers().submit(run, edges[k], edges[k + 1]) for k in range(1, count)]
    try:
        codes = [run(edges[0], edges[1])]
    finally:
        wait(others)  # none of them writes after this
    codes += [other.result() for other in others]
    for code in codes:
        if code == 2:
            raise MemoryError("the kernel library could not allocate its buffers")
        if code != 0:
            raise ValueError(refused)


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """Inside, every kernel runs so many times for each call of it, to be measured without what a
    call costs. Of the whole process: nothing else may use kernels meanwhile."""
    library().qt_repeat(times)
    try:
        yield
    finally:
        library().qt_repeat(1)
