"""The GPTQ column sweep onto levels that are given."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.native.library import address, check, library, over_rows
from qtool.native.rounding import SweepTask, check_order, group_shape

_MODE = 3  # QT_GROUPS_LEVELS
_MOST = 256


@dataclass(frozen=True)
class Levels:
    """What the codes of a matrix [out, in] stand for, in float32, each operation rounded:

    value = scale[row, column // width] * book[code] - offset[row, column // width]
    """

    width: int  # columns that share a scale; of the last ones there may be fewer
    scale: NDArray[np.float32]  # [out, in / width], of any sign, finite
    offset: NDArray[np.float32] | None  # [out, in / width], finite; None: zero
    book: NDArray[np.float32]  # [levels], in any order, at most 256


def gptq_sweep_levels(
    weight: NDArray[Any],
    upper: NDArray[Any],
    *,
    order: NDArray[np.int32] | None = None,
    levels: Levels,
    threads: int | None = None,
) -> NDArray[np.uint8]:
    """[out, in] codes; float32 or float64 by the dtype of weight.

    weight: [out, in], not changed. upper: [in, in] of the same dtype, the upper Cholesky factor U
    of the inverse Hessian, U'U, whose rows and columns are in the order of the sweep. order: [in]
    the column taken at each step. A column becomes the level next to it; halfway between two, the
    even one of a book of consecutive whole numbers, else the lower one of the book. Where the scale
    is zero it becomes the number of the book nearest to zero; of equal numbers, the first.
    """
    dtype = weight.dtype
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"weight is {dtype}, expected float32 or float64")
    check("weight", weight, dtype, (None, None))
    out_features, in_features, width, groups = group_shape(weight, levels.width)
    check("upper", upper, dtype, (in_features, in_features))
    check_order(order, in_features)
    shape = (out_features, groups)
    check("scale", levels.scale, np.float32, shape)
    if levels.offset is not None:
        check("offset", levels.offset, np.float32, shape)
    check("book", levels.book, np.float32, (None,))
    if not 1 <= levels.book.size <= _MOST or not np.isfinite(levels.book).all():
        raise ValueError(f"book is {levels.book}, expected 1 to {_MOST} finite numbers")
    codes = np.empty((out_features, in_features), np.uint8)
    loss = np.empty(out_features, np.float64)
    function = getattr(library(), f"qt_gptq_sweep_f{dtype.itemsize * 8}")

    def run(first: int, last: int) -> int:
        task = SweepTask(
            rows=last - first,
            cols=in_features,
            group_size=width,
            weight=address(weight, first),
            hinv=address(upper),
            order=address(order),
            groups=_MODE,
            levels=levels.book.size,
            codes=address(codes, first),
            scale=address(levels.scale, first),
            loss=address(loss, first),
            book=address(levels.book),
            offset=address(levels.offset, first),
        )
        return int(function(ctypes.byref(task)))

    over_rows(out_features, threads, run)
    return codes
