"""Rows that speak for all of a matrix."""

import numpy as np
from numpy.typing import NDArray

from qtool.errors import SourceError

_PIECE = 1 << 14  # weights
SAMPLED = 1 << 20  # weights of a tensor that are looked at, in such pieces
OF_TABLES = 1 << 22  # the same of embeddings and heads, whose rows differ most


def pieces(
    rows: int, columns: int, matrices: int = 1, sampled: int = SAMPLED
) -> list[tuple[int, int]]:
    """First and last of some rows, all over; of each of several matrices, one below the other.

    sampled: weights, where there are more.
    """
    each = rows // matrices
    step = max(1, min(each, _PIECE // columns))
    every = [
        (matrix * each + first, matrix * each + min(each, first + step))
        for matrix in range(matrices)
        for first in range(0, each, step)
    ]
    most = max(matrices, sampled // (step * columns))
    if len(every) <= most:
        return every
    places = np.unique(np.linspace(0, len(every) - 1, most).round().astype(int))
    return [every[place] for place in places]


def checked(name: str, weight: NDArray[np.float32], first: int) -> NDArray[np.float32]:
    """The rows of a tensor, from `first` on; SourceError where one is not finite."""
    if not np.isfinite(weight).all():
        raise SourceError(
            f"{name}: a weight in rows {first} to {first + len(weight) - 1} is not finite; the "
            "source is damaged, and nothing good can be made of it"
        )
    return weight
