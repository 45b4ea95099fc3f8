"""Scales that are all an unquantized matrix differs from its source by, number for number.

Powers of two are exact in every dtype: what a fold leaves where one of its readers is unquantized.
They may be 1 for most inputs, so that most numbers are the source's: as damage leaves them, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qtool.verification.against.fit import least_squares
from qtool.verification.against.side_by_side import Floats

_EXACT = 2.0**-13  # relative: less than a bit of float16 or bfloat16


@dataclass(frozen=True)
class Scales:
    """new = diag(rows) old diag(columns); None where all are 1."""

    columns: Floats | None  # [in]
    rows: Floats | None  # [out]
    norm: str | None  # whose ratio `columns` is


def only_scaled(new: Floats, old: Floats, norms: Mapping[str, Floats]) -> Scales | None:
    """The scales between two matrices [out, in]; None where anything else is between them.

    norms: of norms in reach that changed, the ratio [in].
    """
    if old.ndim != 2:
        return None
    for key, ratio in norms.items():
        if ratio.size == old.shape[1]:
            scaled = old * ratio
            rows = least_squares(new, scaled, 1)
            if _same(new, rows[:, None] * scaled):
                return Scales(ratio, None if _same(rows, np.ones_like(rows)) else rows, key)
    if len(old) < 2:  # of a single row any change is a scale of its column
        return None
    columns = least_squares(new, old, 0)
    return Scales(columns, None, None) if _same(new, old * columns) else None


def _same(one: Floats, other: Floats) -> bool:
    return bool((np.abs(one - other) <= _EXACT * np.abs(other)).all())
