"""Rows that speak for all of a matrix."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from qtool.errors import SourceError

_PIECE = 1 << 14  # weights
SAMPLED = 1 << 20  # weights of a tensor that are looked at, in such pieces
OF_TABLES = 1 << 22  # the same of embeddings and heads, whose rows differ most


def pieces(rows: int, columns: int, matrices: int = 1) -> list[tuple[int, int]]:
    """First and last of some rows, all over; of each of several matrices, one below the other."""
    each = rows // matrices
    step = max(1, min(each, _PIECE // columns))
    every = [
        (matrix * each + first, matrix * each + min(each, first + step))
        for matrix in range(matrices)
        for first in range(0, each, step)
    ]
    most = max(matrices, SAMPLED // (step * columns))
    if len(every) <= most:
        return every
    places = np.unique(np.linspace(0, len(every) - 1, most).round().astype(int))
    return [every[place] for place in places]


def by_weight(rows: NDArray[np.float64], columns: int) -> list[tuple[int, int, float]]:
    """First and last of some rows of a table, and the weight of all rows that they speak for.

    rows: what an error in each counts. Embeddings and heads have few rows that count for much, so
    pieces are taken evenly by what they count, and one that counts for several speaks for as many.
    """
    step = max(1, min(rows.size, _PIECE // columns))
    every = [(first, min(rows.size, first + step)) for first in range(0, rows.size, step)]
    own = np.add.reduceat(rows, [first for first, _ in every])
    total, most = float(own.sum()), max(1, OF_TABLES // (columns * step))
    if len(every) <= most or total <= 0:
        return [(*span, float(weight)) for span, weight in zip(every, own, strict=True)]
    ends = np.cumsum(own)
    places = np.searchsorted(ends, (np.arange(most) + 0.5) * (ends[-1] / most))
    chosen = Counter(places.tolist())
    return [(*every[place], total * times / most) for place, times in sorted(chosen.items())]


def checked(name: str, weight: NDArray[np.float32], first: int) -> NDArray[np.float32]:
    """The rows of a tensor, from `first` on; SourceError where one is not finite."""
    if not np.isfinite(weight).all():
        raise SourceError(
            f"{name}: a weight in rows {first} to {first + len(weight) - 1} is not finite; the "
            "source is damaged, and nothing good can be made of it"
        )
    return weight
