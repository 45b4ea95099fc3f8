"""What is stored of a matrix, Q, beside its source, W: a few of their rows at a time are in memory
as float32, however large they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from qtool.dequantize import dequantize
from qtool.scheme import GroupQuant
from qtool.streaming.weights import Rows

Floats = NDArray[np.float32]

MOST_ROWS = 256
_WEIGHTS = 1 << 18  # at once, which caches hold
_FEW = 16  # weights of a sum that are quicker added otherwise
_LOST = 1e-28  # float32's squares of numbers far below its root are 0


@dataclass(frozen=True)
class SideBySide:
    """Two matrices [out, in], read by rows."""

    shape: tuple[int, int]
    stored: Rows
    source: Rows

    def pieces(self) -> Iterator[tuple[slice, Floats, Floats]]:
        """Rows, what is stored of them, and the source's; MOST_ROWS are never in two pieces."""
        rows, columns = self.shape
        step = MOST_ROWS
        while step > 1 and step * columns > _WEIGHTS:
            step //= 2
        for first in range(0, rows, step):
            last = min(rows, first + step)
            yield slice(first, last), self.stored(first, last), self.source(first, last)

    def scaled(self, columns: Floats | None, rows: Floats | None) -> "SideBySide":
        """The same with the source multiplied by scales of its columns and rows."""
        if columns is None and rows is None:
            return self

        def source(first: int, last: int) -> Floats:
            return scaled(
                self.source(first, last), columns, None if rows is None else rows[first:last]
            )

        return SideBySide(self.shape, self.stored, source)


def scaled(weight: Floats, columns: Floats | None, rows: Floats | None) -> Floats:
    """diag(rows) W diag(columns); None is 1."""
    found = weight if columns is None else weight * columns
    return found if rows is None else rows[:, None] * found


def rows_of_array(matrix: Floats) -> Rows:
    """The rows of what is in memory."""
    return lambda first, last: matrix[first:last]


def rows_of_quant(quant: GroupQuant) -> Rows:
    """The rows of a quantized matrix, dequantized."""
    return lambda first, last: dequantize(quant.rows(slice(first, last)))


def sums_of_products(
    one: Floats, other: Floats | None, widths: tuple[int, ...]
) -> list[NDArray[np.float64]]:
    """The sums of products (or of one alone) of neighbours [out, in] in so many columns, fewer at
    the end of a row: [out, parts] for each width."""
    rows, columns = one.shape
    unit = gcd(columns, 1024, *widths)
    if unit >= _FEW:
        cut = one.reshape(-1, unit)
        by = np.ones(unit, np.float32) if other is None else other.reshape(-1, unit)
        few = cut @ by if other is None else np.einsum("ij,ij->i", cut, by)
        if _in_reach(few, one):
            units = few.reshape(rows, columns // unit).astype(np.float64)
            return [_added(units, width // unit) for width in widths]
    products = one.astype(np.float64)
    if other is not None:
        products *= other
    return [_added(products, width) for width in widths]


def _added(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    if width == 1:
        return values
    starts = np.arange(0, values.shape[1], width)
    return np.asarray(np.add.reduceat(values, starts, axis=1))


def square_of(values: Floats) -> float:
    """The sum of squares of a piece."""
    flat = np.ascontiguousarray(values).reshape(-1)
    found = np.dot(flat, flat)
    return float(found if _in_reach(found, flat) else np.square(flat, dtype=np.float64).sum())


def _in_reach(sums: Floats | np.floating, values: Floats) -> bool:
    """Whether float32 is wide enough for sums of products: they are finite, and not lost."""
    most = np.abs(sums).max()
    return bool(_LOST <= most < np.inf) or (most < _LOST and not values.any())


def norm(values: Floats) -> float:
    """Frobenius, summed in float64, a part at a time."""
    flat = values.reshape(-1)
    parts = (flat[at : at + _WEIGHTS] for at in range(0, flat.size, _WEIGHTS))
    return float(np.sqrt(sum(float(np.square(part, dtype=np.float64).sum()) for part in parts)))
