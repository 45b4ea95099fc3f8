"""Sums over arrays: a checksum of bytes, and squared differences of float32."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.native.library import address, check, library


def checksum(data: NDArray[Any], seed: int = 0) -> int:
    """64 bits that depend on every byte of a contiguous array; not cryptographic.

    Whoever wants to can make two arrays of one checksum; disks and programs do not by accident.
    """
    if not data.flags.c_contiguous:
        raise ValueError("data is not contiguous")
    result = ctypes.c_uint64()
    code = library().qt_checksum(
        ctypes.c_uint64(seed),
        ctypes.c_int64(data.nbytes),
        ctypes.c_void_p(address(data)),
        ctypes.byref(result),
    )
    assert code == 0
    return result.value


def squares(x: NDArray[np.float32], y: NDArray[np.float32] | None = None) -> float:
    """Sum of (x - y)^2, or of x^2, in float64; finite exactly where every value is."""
    check("x", x, np.float32, [None] * x.ndim)
    if y is not None:
        check("y", y, np.float32, x.shape)
    result = ctypes.c_double()
    code = library().qt_squares(
        ctypes.c_int64(x.size),
        ctypes.c_void_p(address(x)),
        ctypes.c_void_p(address(y)),
        ctypes.byref(result),
    )
    assert code == 0
    return result.value
