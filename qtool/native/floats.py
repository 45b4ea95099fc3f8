"""float32 to and from float16 and bfloat16, rounded to nearest even; NaN stays NaN.

numpy has no bfloat16: it travels as uint16. `out`: where to write, instead of a new array.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qtool.native.library import address, check, library, over_rows

_F32, _F16, _BF16 = 0, 1, 2
_PER_ROW = 1 << 12  # elements split over threads in pieces of this


def to_float16(
    values: NDArray[np.float32],
    threads: int | None = None,
    *,
    out: NDArray[np.float16] | None = None,
) -> NDArray[np.float16]:
    """float16 of the same shape; what is too large becomes infinite."""
    return _convert(values, np.float32, np.float16, _F32, _F16, threads, out)


def from_float16(
    values: NDArray[np.float16],
    threads: int | None = None,
    *,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """float32 of the same shape, exactly."""
    return _convert(values, np.float16, np.float32, _F16, _F32, threads, out)


def to_bfloat16(
    values: NDArray[np.float32],
    threads: int | None = None,
    *,
    out: NDArray[np.uint16] | None = None,
) -> NDArray[np.uint16]:
    """The bits of bfloat16, in the same shape."""
    return _convert(values, np.float32, np.uint16, _F32, _BF16, threads, out)


def from_bfloat16(
    values: NDArray[np.uint16],
    threads: int | None = None,
    *,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """float32 of bits of bfloat16, in the same shape, exactly."""
    return _convert(values, np.uint16, np.float32, _BF16, _F32, threads, out)


def _convert(
    values: NDArray[Any],
    have: DTypeLike,
    want: DTypeLike,
    source: int,
    target: int,
    threads: int | None,
    out: NDArray[Any] | None,
) -> NDArray[Any]:
    check("values", values, have, [None] * values.ndim)
    result = np.empty(values.shape, want) if out is None else check("out", out, want, values.shape)
    function = library().qt_convert
    start, end = address(values) or 0, address(result) or 0

    def run(first: int, last: int) -> int:
        at = first * _PER_ROW
        count = min(last * _PER_ROW, values.size) - at
        return int(
            function(
                source,
                target,
                ctypes.c_int64(count),
                ctypes.c_void_p(start + at * values.itemsize),
                ctypes.c_void_p(end + at * result.itemsize),
            )
        )

    over_rows(-(-values.size // _PER_ROW), threads, run)
    return result
