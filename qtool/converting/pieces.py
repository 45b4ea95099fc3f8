"""Numbers of a matrix some rows at a time: codes are small, float32 of a whole embedding is not."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.expert_stack import ExpertStack
from qtool.converting.blocks import BlockMatrix
from qtool.converting.model import Quantized
from qtool.dequantize import dequantize as native_dequantize
from qtool.scheme import GroupQuant

_AT_ONCE = 1 << 22  # numbers that are float32 in memory

Rows = slice | NDArray[np.int64]


def spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and last row of every piece of a matrix [out, in]."""
    rows, columns = shape
    step = max(1, _AT_ONCE // max(1, columns))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def dequantize(value: Quantized, rows: Rows) -> NDArray[np.float32]:
    """Some rows as float32."""
    if isinstance(value, BlockMatrix):
        return replace(value, raw=np.ascontiguousarray(value.raw[rows])).dequantize()
    if isinstance(value, GroupQuant):
        return native_dequantize(value.rows(rows))
    if isinstance(value, ExpertStack) and isinstance(rows, slice):
        first, last, _ = rows.indices(value.shape[0])
        return value.rows(first, last)
    return value.dequantize()[rows]


def same(one: Quantized, other: Quantized) -> bool:
    """Whether two matrices dequantize to the same numbers."""
    if one.shape != other.shape:
        return False
    return all(
        np.array_equal(dequantize(one, slice(*span)), dequantize(other, slice(*span)))
        for span in spans(one.shape)
    )
