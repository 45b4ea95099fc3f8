"""Cholesky factors and inverses of triangles by tiles, for matrices that keep many cores busy.

LAPACK sums in another order on more threads. Here every product is that of tiles of one size, which
one thread computes: however many there are, the bits are the same. Both work in place.

    factor   a tile on the diagonal -> the tiles below it -> what these take from all after them
    inverse  columns of tiles from the left: V_ij = -(V_i,i..j-1 U_i..j-1,j) V_jj
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

TILE = 512


class Spread(Protocol):
    """Calls a function with each of the items, in any order, by as many threads as are free."""

    def __call__(self, function: Callable[[Any], None], items: Iterable[Any], /) -> None: ...


def in_turn(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    """By the caller alone."""
    for item in items:
        function(item)


def _tiles(start: int, stop: int) -> Iterator[slice]:
    return (slice(first, min(stop, first + TILE)) for first in range(start, stop, TILE))


def cholesky(matrix: torch.Tensor, spread: Spread) -> bool:
    """The lower factor of a symmetric matrix [n, n], with zeros above it; whether there is
    one. Reads the lower triangle."""
    size = len(matrix)
    for at in _tiles(0, size):
        corner, failed = torch.linalg.cholesky_ex(matrix[at, at])
        if int(failed):
            return False
        matrix[at, at] = corner
        rest = [*_tiles(at.stop, size)]

        def below(rows: slice, at: slice = at, corner: torch.Tensor = corner) -> None:
            found = torch.linalg.solve_triangular(
                corner.mT, matrix[rows, at], upper=True, left=False
            )
            matrix[rows, at] = found

        def after(rows: slice, at: slice = at) -> None:
            columns = slice(at.stop, rows.stop)
            matrix[rows, columns].addmm_(matrix[rows, at], matrix[columns, at].mT, alpha=-1)

        spread(below, rest)
        spread(after, reversed(rest))  # the longest first
    matrix.tril_()
    return True


def invert_upper(
    matrix: torch.Tensor, spread: Spread, invert: Callable[[torch.Tensor], None]
) -> None:
    """The inverse of an upper triangle [n, n]. invert: does the same for one tile."""
    for at in _tiles(0, len(matrix)):
        invert(matrix[at, at])
        minus, column = -matrix[at, at], matrix[: at.start, at].clone()

        def above(rows: slice, at: slice = at, minus: torch.Tensor = minus,
                  column: torch.Tensor = column) -> None:  # fmt: skip
            product = matrix[rows, rows.start : at.start] @ column[rows.start :]
            torch.mm(product, minus, out=matrix[rows, at])

        spread(above, _tiles(0, at.start))
