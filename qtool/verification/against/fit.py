"""Scales of columns and rows that bring a source W nearest to what is stored of it, Q.

AWQ and SmoothQuant store Q near diag(r) W diag(c): c is taken out of the norm or the projection
before (r of that one). A norm tells c exactly, as the ratio of its old weight to its new one;
otherwise the least squares of Q over W tell c and r, up to a factor that they share:

    c[k] = sum_o Q W / sum_o W W        r[o] = sum_k Q W / sum_k W W        in turns

for c of Q / diag(r), for r of W diag(c). The matrices are read anew for each of these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qtool.verification.against.side_by_side import Floats, SideBySide, scaled, square_of
from qtool.verification.against.taken import Taken, taken

MATCH = 0.1  # of the logarithm: how well two halves of a fold must fit
WORTH = 0.9  # of the error: scales that leave more of it are chance
_ROUNDS = 3
_NEAR = 0.15  # of the logarithm: how well a norm's ratio must fit
_STRANGE = 0.7  # of what is stored: free scales that leave more are fitted to another matrix
_ENOUGH = 3e-3  # relative: nearer than rounding to 8 bits, nothing is told

Scales = tuple[Floats | None, Floats | None]  # of columns, of rows


@dataclass(frozen=True)
class Fit:
    """The scales between a matrix and its source."""

    columns: Floats | None
    rows: Floats | None
    norm: str | None
    left: float  # how far Q is off with these
    without_rows: float  # how far Q is off with the norm's ratio alone
    could: frozenset[str] = frozenset()  # norms whose ratio it may have: it is as near with that
    # Where the rows have one factor, which is of the columns as well: the scales of these alone.
    as_columns: Floats | None = None
    taken: Mapping[str, Taken] = field(default_factory=dict)  # by norm


def fit(pair: SideBySide, norms: Mapping[str, Floats]) -> Fit:
    """Scales of columns and rows that bring the source [out, in] nearest to what is stored.

    Of what brings it about as near as anything does, what says the least: a norm's ratio before
    scales that are free, and none before any.
    """
    ratios = {n: ratio for n, ratio in norms.items() if ratio.size == pair.shape[1]}
    size, lengths, free, with_ratio = _rows_of(pair, ratios)
    rows = lengths
    for _ in range(_ROUNDS):  # rows are rounded by steps of their own size, so they count alike
        columns = _columns_of(pair, rows)
        rows = _rows_by(pair, columns)
    choices: list[tuple[Floats | None, Floats | None, str | None]] = [(None, None, None)]
    choices += [(None, free, None)]
    named = {n: spread(ratio, columns) for n, ratio in ratios.items()}
    best = min(named, key=lambda n: named[n], default=None)
    if best is not None and named[best] < _NEAR:
        ratio = ratios[best]
        choices = [(ratio, None, best), *choices, (ratio, with_ratio[best], best)]
    alone = _columns_of(pair, None)
    choices += [(alone, None, None), (columns, rows, None)]
    ways: list[Scales] = [(c, r) for c, r, _ in choices]
    for name, ratio in ratios.items():
        ways += [(ratio, None), (ratio, with_ratio[name])]
    off = _far(pair, ways)
    far, tried = off[: len(choices)], off[len(choices) :]
    likely = [left for left, (c, r, n) in zip(far, choices, strict=True)
              if n is not None or (c is None and r is None) or left < _STRANGE * size]  # fmt: skip
    enough = max(min(likely) / WORTH, _ENOUGH * size)
    chosen = next(n for n, left in enumerate(far) if left in likely and left <= enough)
    chosen_columns, chosen_rows, chosen_norm = choices[chosen]
    reach = (far[chosen] + _ENOUGH * size) / WORTH
    nearest = map(min, tried[::2], tried[1::2])
    could = [name for name, left in zip(ratios, nearest, strict=True) if left <= reach]
    as_it_is = next(n for n, (c, r, _) in enumerate(choices) if c is None and r is None)
    evenly = far[0] if chosen_norm is not None else far[as_it_is]
    one_factor = chosen_rows is free and chosen_columns is None and uneven(free) < MATCH
    return Fit(
        chosen_columns, chosen_rows, chosen_norm, far[chosen], evenly, frozenset(could),
        alone if one_factor else None, taken(pair, ratios, with_ratio),
    )  # fmt: skip


def _rows_of(
    pair: SideBySide, ratios: Mapping[str, Floats]
) -> tuple[float, Floats, Floats, dict[str, Floats]]:
    """The norm of what is stored; its rows' lengths over the source's; the scales of rows, of the
    source as it is and with each ratio."""
    out = pair.shape[0]
    squares = np.empty((2, out))
    ways: list[Floats | None] = [None, *ratios.values()]
    sums = np.empty((len(ways), 2, out))
    for rows, stored, weight in pair.pieces():
        squares[:, rows] = [np.einsum("ij,ij->i", m, m) for m in (stored, weight)]
        for number, ratio in enumerate(ways):
            sums[number, :, rows] = _over(stored, scaled(weight, ratio, None), 1)
    long = np.maximum(np.sqrt(squares), 1e-30)
    free, *others = (_scales(found, over) for found, over in sums)
    lengths = (long[0] / long[1]).astype(np.float32)
    return float(np.sqrt(squares[0].sum())), lengths, free, dict(zip(ratios, others, strict=True))


def _rows_by(pair: SideBySide, columns: Floats) -> Floats:
    """The scales of rows of the source with its columns scaled."""
    sums = np.empty((2, pair.shape[0]))
    for rows, stored, weight in pair.pieces():
        sums[:, rows] = _over(stored, weight * columns, 1)
    return _scales(*sums)


def _columns_of(pair: SideBySide, by: Floats | None) -> Floats:
    """The scales of columns, rows of what is stored divided by `by`."""
    sums = np.zeros((2, pair.shape[1]))
    for rows, stored, weight in pair.pieces():
        sums += _over(stored if by is None else stored / by[rows, None], weight, 0)
    return _scales(*sums)


def _over(stored: Floats, weight: Floats, axis: int) -> NDArray[np.float32]:
    """The sums of Q W and of W W, of columns (axis 0) or rows (axis 1)."""
    to = "j" if axis == 0 else "i"
    pairs = (stored, weight), (weight, weight)
    return np.stack([np.einsum(f"ij,ij->{to}", one, other) for one, other in pairs])


def _far(pair: SideBySide, ways: Sequence[Scales]) -> list[float]:
    """How far the source is from what is stored, scaled in each of these ways."""
    lost = np.zeros(len(ways))
    for at, stored, weight in pair.pieces():
        for number, (columns, rows) in enumerate(ways):
            by = None if rows is None else rows[at]
            lost[number] += square_of(scaled(weight, columns, by) - stored)
    return [float(left) for left in np.sqrt(lost)]


def least_squares(stored: Floats, weight: Floats, axis: int) -> Floats:
    """The scale of each column (axis 0) or row (axis 1)."""
    found = (stored * weight).sum(axis=axis, dtype=np.float64)
    return _scales(found, np.square(weight).sum(axis=axis, dtype=np.float64))


def _scales(found: NDArray[np.float64], over: NDArray[np.float64]) -> Floats:
    """Sums of Q W over those of W W; 1 where the source is 0.

    One that was rounded away is small, by how much is not known: it gets the least of the others.
    """
    scales = found / np.where(over > 0, over, 1)
    good = (over > 0) & (scales > 0)
    least = scales[good].min() if good.any() else 1.0
    return np.where(good, scales, np.where(over > 0, min(least, 1.0), 1)).astype(np.float32)


def spread(one: Floats, other: Floats) -> float:
    """The mean distance of the logarithms of two sets of scales, a common factor apart."""
    apart = _apart(one, other)
    return _mean(apart - np.median(apart)) if apart.size else float("inf")


def distance(one: Floats, other: Floats) -> float:
    """The same with the common factor."""
    apart = _apart(one, other)
    return _mean(apart) if apart.size else float("inf")


def _apart(one: Floats, other: Floats) -> NDArray[np.float64]:
    good = (one > 0) & (other > 0)
    return np.asarray(np.log(one[good].astype(np.float64) / other[good]))


def _mean(logarithms: NDArray[np.float64]) -> float:
    """Of sizes; one that is far off counts as e times, so that single channels decide nothing."""
    return float(np.minimum(np.abs(logarithms), 1.0).mean())


def uneven(scales: Floats | None) -> float:
    """How far scales are from being all the same."""
    return 0.0 if scales is None else spread(scales, np.ones_like(scales))
