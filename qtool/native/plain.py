"""The loop that kernels are timed against: so many bytes read, so many written, no arithmetic."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.native.library import address, check, library, over_rows

_ROW = 1 << 12  # bytes of the larger array, which is split over threads in runs of this


def plain(
    source: NDArray[np.uint8],
    target: NDArray[np.uint8],
    *,
    streaming: bool = False,
    threads: int | None = None,
) -> None:
    """Reads all of `source` and overwrites all of `target`, but for less than a vector at the end.

    streaming: stores that pass the caches, where the instruction set has them; `target` must then
    begin at a multiple of 64.
    """
    check("source", source, np.uint8, (None,))
    check("target", target, np.uint8, (None,))
    rows = max(source.size, target.size) // _ROW
    if min(source.size, target.size) < max(64, 64 * rows):
        raise ValueError(
            f"source has {source.size} bytes and target {target.size}; "
            f"expected at least 64 for every {_ROW} of the larger"
        )
    if streaming and target.ctypes.data % 64:
        raise ValueError("target does not begin at a multiple of 64 bytes")
    function = library().qt_plain

    def part(array: NDArray[Any], first: int, last: int) -> tuple[int, int]:
        """Address and length of a share of an array, in whole cache lines."""
        begin = array.size * first // max(rows, 1) // 64 * 64
        end = array.size if last == rows else array.size * last // rows // 64 * 64
        return (address(array) or 0) + begin, end - begin

    def run(first: int, last: int) -> int:
        from_, size = part(source, first, last)
        to, room = part(target, first, last)
        return int(
            function(
                ctypes.c_void_p(from_),
                ctypes.c_int64(size),
                ctypes.c_void_p(to),
                ctypes.c_int64(room),
                int(streaming),
            )
        )

    over_rows(rows, threads, run)
