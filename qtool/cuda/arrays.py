"""Arrays as tasks see them: where they lie, their shape and the name of their dtype.

A kernel's pointers are numbers, so that numpy arrays (which the tests run through the kernels
compiled for the host) and torch tensors on a GPU are described by the same code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ALIGNED = 16  # bytes that a kernel reads and writes at once


@dataclass(frozen=True)
class Array:
    """A contiguous array; bfloat16 of numpy travels as uint16."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


def describe(name: str, array: Any, dtypes: Sequence[str], shape: Sequence[int | None]) -> Array:
    """The array, if it has one of these dtypes and this shape (None: any length).

    TypeError, or ValueError where it is of another shape, not contiguous, or begins between
    multiples of 16 bytes.
    """
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        raise TypeError(f"{name} is {dtype}, expected {' or '.join(dtypes)}")
    have = tuple(int(n) for n in array.shape)
    if len(have) != len(shape) or any(
        n is not None and n != m for n, m in zip(shape, have, strict=True)
    ):
        wanted = tuple("any" if n is None else n for n in shape)
        raise ValueError(f"{name} has shape {have}, expected {wanted}")
    if hasattr(array, "data_ptr"):
        contiguous, address = bool(array.is_contiguous()), int(array.data_ptr())
    else:
        contiguous, address = bool(array.flags.c_contiguous), int(array.ctypes.data)
    if not contiguous:
        raise ValueError(f"{name} is not contiguous")
    if address % ALIGNED:
        raise ValueError(f"{name} begins at no multiple of {ALIGNED} bytes; copy it first")
    return Array(address, int(array.nbytes), have, dtype)
