"""One matrix against its source, with scales that were folded into its columns or rows taken out.

AWQ and SmoothQuant store Q near diag(r) W diag(c): c is taken out of the norm or the projection
before (r of that one). A norm tells c exactly, as the ratio of its old weight to its new one;
otherwise the least squares of Q over W tell c and r, up to a factor that they share:

    c[k] = sum_o Q W / sum_o W W        r[o] = sum_k Q W / sum_k W W        in turns

for c of Q / diag(r), for r of W diag(c).

That a scale which was found is also taken out somewhere is judged in `error`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qtool.dequantize import dequantize
from qtool.formats.float_codes import TABLES
from qtool.scheme import GroupQuant
from qtool.verification.likeness import Likeness, likeness
from qtool.verification.matrix import group_means
from qtool.verification.pruned import is_pruned

Floats = NDArray[np.float32]

# Times the expected error: GPTQ makes up to 2, a clipped range up to 3.5.
UNEXPLAINED = 4.0
WRONG = 6.0
_SURELY = 6  # standard errors
LOST = 0.95  # relative: as far off as a matrix of zeros
_PLAIN = 1.2  # times the expected error: no need to look for scales below
_FEW_CLIPPED = 0.01  # of the weights
WORTH = 0.9  # of the error: scales that leave more of it are chance
_ROUNDS = 3
_NEAR = 0.15  # of the logarithm: how well a norm's ratio must fit
_STRANGE = 0.7  # of what is stored: free scales that leave more are fitted to another matrix
_ENOUGH = 3e-3  # relative: nearer than rounding to 8 bits, nothing is told


@dataclass(frozen=True)
class Compared:
    """A matrix beside its source."""

    name: str
    error: float  # relative, with the scales taken out
    plain_error: float  # relative, as it is
    expected: float | None
    plain_expected: float | None
    columns: Floats | None  # the scales that were found, [in]
    rows: Floats | None  # likewise, [out]
    norm: str | None  # whose ratio `columns` is
    off: int  # groups whose zero is off by whole steps
    step: int  # by how many most of them are
    groups: int
    without_rows: float | None = None  # the error with the norm's ratio alone, over the expected
    could: frozenset[str] = frozenset()  # norms of which coarse codes cannot tell whether they are
    untold: bool = False  # its codes are too coarse to tell what the scales belong to
    like: Likeness | None = None  # part by part, with the scales taken out
    plainly_like: Likeness | None = None  # as it is
    pruned: bool = False  # and its source is not

    @property
    def explained(self) -> bool:
        """Whether the error is what the scheme makes."""
        return self.expected is None or self.error <= UNEXPLAINED * self.expected

    @property
    def wrong(self) -> bool:
        """Whether it is so far off that it cannot be the matrix that was quantized."""
        over = self.expected is not None and self.error > WRONG * self.expected
        return not self.explained and (over or self.error > LOST)

    @property
    def plainly_explained(self) -> bool:
        """The same without taking any scales out."""
        expected = self.plain_expected
        return expected is not None and self.plain_error <= UNEXPLAINED * expected

    @property
    def rows_by_chance(self) -> bool:
        """Whether the scheme explains the error without the scales of rows, beside a norm's."""
        return self.without_rows is not None and self.without_rows <= UNEXPLAINED

    def as_it_is(self) -> "Compared":
        """Without the scales that were found."""
        return replace(
            self, error=self.plain_error, expected=self.plain_expected, columns=None, rows=None,
            like=self.plainly_like,
        )  # fmt: skip


def expected_error(quant: GroupQuant) -> float:
    """The norm of W - Q that rounding to the nearest makes: sqrt(sum step^2 / 12), where a step is
    the scale, for small floats times the distance of a code's neighbours.

    Groups with a single code count nothing: nothing was rounded there.
    """
    index = quant.group_index()
    scale = quant.row_scale().astype(np.float64)
    if quant.scheme.outer == "after" and quant.outer is not None:
        scale *= quant.outer
    members = np.bincount(index, minlength=scale.shape[1])  # a damaged g_idx leaves groups empty
    if quant.scheme.is_float:
        counts = group_means(quant, _steps(quant.scheme.book)[quant.codes]) * members
    else:
        counts = np.broadcast_to(members, scale.shape)
    squares = scale * scale * counts
    return float(np.sqrt(squares[~_single(quant)].sum() / 12))


def _steps(book: str) -> Floats:
    """For each code, the square of the mean distance to its two neighbours."""
    table = TABLES[book]
    finite = np.unique(table[np.isfinite(table)])
    gaps = np.diff(finite)
    mean = np.concatenate([gaps[:1], (gaps[1:] + gaps[:-1]) / 2, gaps[-1:]])
    at = np.searchsorted(finite, np.where(np.isfinite(table), table, 0))
    return np.asarray(np.square(mean[at]), np.float32)


def _single(quant: GroupQuant) -> NDArray[np.bool_]:
    """[out, groups]: groups in which every code is the same."""
    index = quant.group_index()
    groups = quant.scale.shape[1]
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=groups)
    starts = np.minimum(np.cumsum(counts) - counts, index.size - 1)
    codes = quant.codes if quant.g_idx is None else quant.codes[:, order]
    low = np.minimum.reduceat(codes, starts, axis=1)
    return np.asarray(low == np.maximum.reduceat(codes, starts, axis=1))


def compare(
    name: str,
    quant: GroupQuant,
    weight: Floats,
    norms: Mapping[str, Floats],
) -> Compared:
    """weight: the source, [out, in]. norms: of norms in reach that changed, the ratio [in]."""
    stored = dequantize(quant)
    lost = expected_error(quant)
    size = norm(weight)
    plain = norm(weight - stored)
    if plain > _PLAIN * lost:
        lost = _with_clipped(quant, weight, stored, lost)
    found = Fit(None, None, None, weight, plain)
    pruned = plain > _PLAIN * lost and is_pruned(stored) and not is_pruned(weight)
    if (plain > _PLAIN * lost and not pruned) or norms:
        found = fit(stored, weight, norms)
    target = found.target
    whole = norm(target)
    left = target - stored
    off, step = _zeros_off(quant, left)
    like = likeness(quant, target, stored, lost)
    return Compared(
        name,
        norm(left) / whole if whole else norm(stored),
        plain / size if size else norm(stored),
        lost / whole if whole else None,
        lost / size if size else None,
        found.columns,
        found.rows,
        found.norm,
        off,
        step,
        quant.scale.size,
        found.without_rows / lost if lost else None,
        found.could,
        like=like,
        plainly_like=like if target is weight else likeness(quant, weight, stored, lost),
        pruned=pruned,
    )


def _with_clipped(quant: GroupQuant, weight: Floats, stored: Floats, lost: float) -> float:
    """The expected error with that of a few weights beyond the ends of their range, where rounding
    explains all others: AutoRound's search clips weights of 8 bits that count little."""
    if quant.scheme.is_float:
        return lost
    ends = (quant.codes == 0) | (quant.codes == (1 << quant.scheme.bits) - 1)
    clipped = ends & (np.abs(weight) > np.abs(stored)) & (weight * stored >= 0)
    left = weight - stored
    if clipped.mean() > _FEW_CLIPPED or norm(left[~clipped]) > _PLAIN * lost:
        return lost
    return float(np.hypot(lost, norm(left[clipped])))


def norm(values: Floats) -> float:
    """Frobenius, summed in float64."""
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))


@dataclass(frozen=True)
class Fit:
    """The scales between a matrix and its source."""

    columns: Floats | None
    rows: Floats | None
    norm: str | None
    target: Floats  # what Q is near to
    without_rows: float  # how far Q is off with the norm's ratio alone
    could: frozenset[str] = frozenset()  # norms whose ratio it may have: it is as near with that


def fit(stored: Floats, weight: Floats, norms: Mapping[str, Floats]) -> Fit:
    """Scales of columns and rows that bring weight [out, in] nearest to stored [out, in].

    Of what brings it about as near as anything does, what says the least: a norm's ratio before
    scales that are free, and none before any.
    """
    long = (np.linalg.norm(matrix, axis=1) for matrix in (stored, weight))
    rows = np.divide(*(np.maximum(lengths, 1e-30) for lengths in long))
    for _ in range(_ROUNDS):  # rows are rounded by steps of their own size, so they count alike
        columns = least_squares(stored / rows[:, None], weight, 0)
        rows = least_squares(stored, weight * columns, 1)
    free = least_squares(stored, weight, 1)
    choices: list[tuple[Floats | None, Floats | None, str | None]] = [(None, None, None)]
    choices += [(None, free, None)]
    named = {n: spread(ratio, columns) for n, ratio in norms.items() if ratio.size == columns.size}
    best = min(named, key=lambda n: named[n], default=None)
    if best is not None and named[best] < _NEAR:
        ratio = norms[best]
        choices = [
            (ratio, None, best), *choices, (ratio, least_squares(stored, weight * ratio, 1), best)
        ]  # fmt: skip
    choices += [
        (least_squares(stored, weight, 0), None, None),
        (columns, rows, None),
    ]
    far = [norm(_scaled(weight, c, r) - stored) for c, r, _ in choices]
    size = norm(stored)
    likely = [left for left, (c, r, n) in zip(far, choices, strict=True)
              if n is not None or (c is None and r is None) or left < _STRANGE * size]  # fmt: skip
    enough = max(min(likely) / WORTH, _ENOUGH * size)
    chosen = next(n for n, left in enumerate(far) if left in likely and left <= enough)
    chosen_columns, chosen_rows, chosen_norm = choices[chosen]
    target = _scaled(weight, chosen_columns, chosen_rows)
    reach = (norm(target - stored) + _ENOUGH * size) / WORTH
    could = [name for name, ratio in norms.items() if _could(stored, weight, ratio, reach)]
    evenly = far[0] if chosen_norm is not None else norm(weight - stored)
    return Fit(chosen_columns, chosen_rows, chosen_norm, target, evenly, frozenset(could))


def _could(stored: Floats, weight: Floats, ratio: Floats, reach: float) -> bool:
    """Whether a norm's ratio, with rows or without, brings weight within reach of stored."""
    if ratio.size != weight.shape[1]:
        return False
    scaled = weight * ratio
    rows = least_squares(stored, scaled, 1)
    return min(norm(scaled - stored), norm(rows[:, None] * scaled - stored)) <= reach


def _scaled(weight: Floats, columns: Floats | None, rows: Floats | None) -> Floats:
    scaled = weight if columns is None else weight * columns
    return scaled if rows is None else rows[:, None] * scaled


def least_squares(stored: Floats, weight: Floats, axis: int) -> Floats:
    """The scale of each column (axis 0) or row (axis 1); 1 where the source is 0.

    One that was rounded away is small, by how much is not known: it gets the least of the others.
    """
    over = np.square(weight).sum(axis=axis, dtype=np.float64)
    found = (stored * weight).sum(axis=axis, dtype=np.float64) / np.where(over > 0, over, 1)
    good = (over > 0) & (found > 0)
    least = found[good].min() if good.any() else 1.0
    return np.where(good, found, np.where(over > 0, min(least, 1.0), 1)).astype(np.float32)


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


def _zeros_off(quant: GroupQuant, left: Floats) -> tuple[int, int]:
    """How many groups have a zero that is off by whole steps, and by how many most of them.

    W - Q is (zero stored - zero meant) * scale on average, and 0 where they are the same, but for
    what is left by chance of the few weights of a group, which GPTQ leaves farther off.
    """
    if quant.scheme.is_float:
        return 0, 0
    scale = quant.row_scale().astype(np.float64)
    means = group_means(quant, left)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scale != 0, means / scale, 0.0)
    steps = np.where(np.isfinite(steps), steps, 0.0)
    off = np.abs(steps) > 0.6
    if off.any():
        count = np.maximum(np.bincount(quant.group_index(), minlength=means.shape[1]), 1)
        spread = group_means(quant, left.astype(np.float64) ** 2) - means**2
        chance = np.sqrt(np.maximum(spread, 0) / count)
        off &= np.abs(means) > _SURELY * chance
    if not off.any():
        return 0, 0
    whole, counts = np.unique(np.rint(steps[off]), return_counts=True)
    return int(off.sum()), int(whole[counts.argmax()])
