"""The arithmetic of integer grids that every method shares: scales, zeros and codes of groups.

    asymmetric   scale = (max(w, 0) - min(w, 0)) / (2^b - 1)      zero = round(-min(w, 0) / scale)
    symmetric    scale = max|w| / reach                           zero = 2^(b-1)
    codes        q = clip(round(w / scale) + zero, 0, 2^b - 1)    w ~ (q - zero) * scale

Zero itself is always on the grid. A symmetric grid has one more step below zero than above, so
`reach` decides what the positive end loses: 2^(b-1) - 1/2 is GPTQ's convention (at most half a
step is cut off there, no more than rounding costs); at up to 4 bits 2^(b-1), which cuts a whole
step off but makes every step smaller, has the lower squared error on real weights (0.63, 0.80
and 0.91 times GPTQ's at 2, 3 and 4 bits; 1.02 times at 8). Only positive scales are used, since
not every engine takes negative ones.

Scales are rounded to their stored float16 before any zero or code is computed from them; one too
small for it becomes the smallest there is, and a group that is zero throughout has scale 1, so that
its codes equal its zero.
Rounding is to nearest, ties to even, everywhere.

`qtool.native` computes this; tests hold it to the same in numpy
(tests/support/methods/integer_grids.py).
"""

import numpy as np
from numpy.typing import NDArray

from qtool.errors import UnsupportedError
from qtool.scheme import Scheme

Floats = NDArray[np.float32]


def group_width(scheme: Scheme, columns: int) -> int:
    """Columns in a group: the whole row where the scheme says -1."""
    return scheme.group_size if scheme.group_size > 0 else columns


def reach(bits: int) -> float:
    """Steps from zero to max|w| on a symmetric grid."""
    half = float(1 << (bits - 1))
    return half if bits <= 4 else half - 0.5


def check_scales(scale: NDArray[np.floating], first_row: int = 0) -> None:
    """UnsupportedError where a scale [out, groups] was too large and is now float16's largest.
    first_row: of the matrix, where these are some of its rows."""
    if not (scale < 65504).all():
        row, group = np.argwhere(~(scale < 65504))[0]
        raise UnsupportedError(
            f"row {first_row + row}, group {group} needs a larger scale than float16 holds "
            "(65504); leave this tensor dense with an override in the recipe"
        )


def ranges(grouped: Floats) -> tuple[Floats, Floats]:
    """The range of each group with zero inside it: low <= 0 <= high, [out, groups]."""
    return np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
