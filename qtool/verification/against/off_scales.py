"""Single scales that are not those that their codes were made with.

Of thousands of scales one hardly shows in the error of a matrix. But where a scale is wrong, all of
its weights are off by one factor, and without it they are where rounding leaves them. Both are
counted in steps of the codes, mean squares over the weights w of one scale, stored as q:

    times = sum q q / sum q w       off: of w - q       left: of w * times - q

Rounding to the nearest leaves 1/12. Noise of n weights is so much like them by chance that a
factor takes it out with a probability of (left / off)^(n / 2): the weights of a small group must be
farther off than those of a large one. Of few bits twice a scale is about a step: nothing is told.

What lies at the ends of the range may be clipped, and is left out. What the scales of the same
columns, or of the same row, have in common is a fold, and no damage.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from qtool.float_codes import LARGEST, TABLES
from qtool.scheme import GroupQuant
from qtool.verification.against.likeness import sums_by_group
from qtool.verification.against.places import weights_of
from qtool.verification.against.side_by_side import Floats, SideBySide
from qtool.verification.against.steps import steps_of

NEAR = 0.8  # and its inverse: two steps of a scale in e4m3, which has the fewest digits
_FEWEST_BITS = 3
_ROUNDED = 1 / 12  # the mean square of what rounding to the nearest leaves, in steps
_EXPLAINED = 16.0  # times that: GPTQ makes 4
OFF = 4.0  # times what is left: the least that counts, of any number of weights
_LIKELY = 1.5  # likewise, where folds leave as much
_CHANCE = 16.0  # e^-16: once in ten million groups
MANY = 0.1  # of the scales: they have another reason
_FEW_SCALES = 3  # fewer of a row or of some columns have no scale that is the usual one
LEAST = 1e-6  # of the mean square: parts of the source that are about 0 tell nothing
_ROWS = 64  # at once


@dataclass(frozen=True)
class OffScale:
    """Where a scale is in the grid of scales, and how many times it is what its codes need."""

    row: int
    group: int | None  # None is all of the row, which a fold may be as well
    times: float
    weights: str  # which have it, for messages


def off_scales(quant: GroupQuant, pair: SideBySide, groups: Floats) -> tuple[OffScale, ...]:
    """The scales of a matrix that are unlike the source's. groups: its sums, as in `likeness`."""
    if quant.scheme.bits < _FEWEST_BITS or quant.scale.size < 2:
        return ()
    many = max(1, int(MANY * quant.scale.size))
    suspects = _suspects(quant, groups)
    suspects &= _of_grid(quant, groups)[1] != 0  # of zeros there is no factor
    found = list(islice(_found(quant, pair, suspects), many + 1))
    if len(found) > many:
        return ()
    by_group = Counter(one.group for one in found)
    most = max(1, len(_starts(quant)) // 4)
    return tuple(one for one in found if one.group is None or by_group[one.group] <= most)


def likely_off(quant: GroupQuant, groups: Floats) -> tuple[OffScale, ...]:
    """Scales of single groups that may be off, as far as sums tell; none where they are many."""
    if quant.scheme.bits < _FEWEST_BITS or quant.scale.size < 2:
        return ()
    suspects = _suspects(quant, groups, _LIKELY)
    if suspects.shape[1] < 2 or suspects.sum() > max(1, MANY * suspects.size):
        return ()
    whole, shared, _ = _of_grid(quant, groups)
    at = zip(*np.nonzero(suspects), strict=True)
    return tuple(OffScale(int(o), int(g), float(shared[o, g] / whole[o, g]), "") for o, g in at)


def single(found: Iterable[OffScale]) -> tuple[OffScale, ...]:
    """Those that no fold makes: of one group among others."""
    return tuple(one for one in found if one.group is not None)


def one_of_two(found: Iterable[OffScale]) -> tuple[OffScale, ...]:
    """Of rows with two groups and a fold, which is what both have: either may be the one that is
    off, and the other then seems so, too."""
    rows: dict[int, OffScale] = {}
    for one in sorted(found, key=lambda one: abs(one.times)):
        beside = "" if one.group is None else " beside the other one"
        rows[one.row] = replace(one, weights=f"{one.weights}{beside}")
    return tuple(rows.values())


def mended(quant: GroupQuant, found: Sequence[OffScale]) -> GroupQuant:
    """With the scales that the codes need."""
    scale = quant.scale.astype(np.float32)
    for one in found:
        scale[one.row, one.group] /= np.float32(one.times)
    offset = quant.row_offset() if quant.scheme.outer == "offset" else None
    return replace(quant, scale=scale, offset=offset)


def _starts(quant: GroupQuant) -> NDArray[np.int64]:
    """The first row of each row of the grid of scales."""
    rows = quant.shape[0]
    return np.arange(0, rows, quant.scheme.rows if quant.scheme.rows > 0 else rows)


def _of_grid(quant: GroupQuant, groups: Floats) -> Sequence[Floats]:
    """Sums of W W, Q W and (W - Q)^2 over the weights of each scale."""
    if quant.scheme.rows == 1:
        return [*groups[:3]]
    return [np.add.reduceat(one, _starts(quant), axis=0) for one in groups[:3]]


def _suspects(quant: GroupQuant, groups: Floats, worth: float = OFF) -> NDArray[np.bool_]:
    """Of the grid of scales, those whose error is `worth` times what a factor leaves of it."""
    whole, shared, lost = _of_grid(quant, groups)
    least = max(np.float32(LEAST * whole.mean(dtype=np.float64)), np.finfo(np.float32).tiny)
    if quant.scheme.outer == "offset":  # a scale alone makes no factor of all weights
        width = quant.shape[1] / whole.shape[1]
        return np.asarray(lost > OFF * _ROUNDED * width * np.square(quant.row_scale()))
    gain = shared / np.maximum(whole, least)
    odd = _unlike(gain) & (whole > least)
    if not odd.any():
        return odd
    # What is left with the best factor, of numbers as large as the stored ones.
    stored = np.maximum(lost + 2 * shared - whole, gain * shared)
    odd &= lost > worth * (stored - gain * shared)
    if odd.any() and len(gain) >= _FEW_SCALES:
        odd &= _unlike(_over(gain, np.median(gain, axis=0)))
    if odd.any() and gain.shape[1] > 1:
        odd &= _unlike(_over(gain, _usual(gain))) | odd.all(axis=1, keepdims=True)
    return odd


def _usual(gain: NDArray[np.floating]) -> NDArray[np.floating]:
    """What most groups [.., groups] of a row have; of two groups each one the other's."""
    if gain.shape[-1] == 2:
        return gain[..., ::-1]
    return np.asarray(np.median(gain, axis=-1, keepdims=True))


def _over(gain: NDArray[np.floating], usual: NDArray[np.floating]) -> NDArray[np.floating]:
    """The gains as times what is usual; as they are where most of them are 0."""
    return np.asarray(gain / np.where(usual != 0, usual, 1))


def _unlike(times: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Which factors are not about 1."""
    return np.asarray(~((times > NEAR) & (times < 1 / NEAR)))


def _found(quant: GroupQuant, pair: SideBySide, suspects: NDArray[np.bool_]) -> Iterator[OffScale]:
    """Those of the suspects that a factor explains, weight by weight."""
    starts = [*_starts(quant), quant.shape[0]]
    for grid, sums in _sums_of(quant, pair, np.asarray(suspects.any(axis=1))):
        every, all_sure = _judged(sums, quant.scheme.outer == "offset")
        all_sure &= suspects[grid]
        all_usual = np.broadcast_to(_usual(np.where(np.isfinite(every), every, 1)), every.shape)
        for at in np.flatnonzero(all_sure.any(axis=1)):
            row, times, sure, usual = int(grid[at]), every[at], all_sure[at], all_usual[at]
            rows = int(starts[row]), int(starts[row + 1])
            alone = sure & _unlike(times / usual)
            if sure.all() and not alone.any():
                yield OffScale(row, None, float(np.median(times)), weights_of(quant, rows, None))
            elif quant.scale.shape[1] > 1:
                for group in map(int, np.flatnonzero(alone)):
                    by = float(times[group] / usual[group])
                    yield OffScale(row, group, by, weights_of(quant, rows, group))


def _sums_of(
    quant: GroupQuant, pair: SideBySide, rows: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Of these rows of the grid, a few at a time: which, and their sums [6, rows, groups]."""
    if quant.scheme.rows == 1:
        for first in range(0, rows.size, _ROWS):
            some = first + np.flatnonzero(rows[first : first + _ROWS])
            if some.size:
                yield some, _sums(quant, pair, some)
        return
    starts = [*_starts(quant), quant.shape[0]]
    for row in np.flatnonzero(rows):
        sums = np.zeros((6, 1, quant.scale.shape[1]))
        for first in range(starts[row], starts[row + 1], _ROWS):
            part = np.arange(first, min(first + _ROWS, starts[row + 1]))
            sums += _sums(quant, pair, part).sum(axis=1, keepdims=True)
        yield np.array([row]), sums


def _sums(quant: GroupQuant, pair: SideBySide, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of rows that are near each other, by group, over the weights that are not at an end: their
    count; of w and q in steps: w, q, w w, w q and q q."""
    part = quant.rows(rows)
    first, last = int(rows[0]), int(rows[-1]) + 1
    step = np.maximum(steps_of(part), np.float32(1e-30))
    inner = _inner(part)
    w, q = (
        np.where(inner, m(first, last)[rows - first] / step, np.float32(0))
        for m in (pair.source, pair.stored)
    )
    sums = (inner.astype(np.float32), w, q, w * w, w * q, q * q)
    return np.stack([sums_by_group(part, one) for one in sums])


def _inner(quant: GroupQuant) -> NDArray[np.bool_]:
    """Weights whose codes are not at an end of their range."""
    scheme = quant.scheme
    if scheme.is_float:
        size = np.abs(TABLES[scheme.book][quant.codes])
        return np.asarray(size < LARGEST[scheme.book])
    top = (1 << scheme.bits) - 1
    least = 1 if scheme.symmetric else 0  # whose range may be as far down as it is up
    return (quant.codes > least) & (quant.codes < top)


def _judged(
    sums: NDArray[np.float64], centred: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Of each group, how many times its scale is what its codes need, and whether that is sure.
    centred: a number is added to all of its weights."""
    count, w, q, ww, wq, qq = sums
    count = np.maximum(count, 1)
    off = (ww - 2 * wq + qq) / count
    if centred:
        ww, wq, qq = ww - w * w / count, wq - w * q / count, qq - q * q / count
    times = np.divide(qq, wq, out=np.full_like(qq, np.nan), where=wq != 0)
    left = np.maximum((times * times * ww - qq) / count, 0)
    rounded = np.maximum(left, _ROUNDED)
    sure = (off > worth(count) * rounded) & (left < _EXPLAINED * _ROUNDED)
    return times, _unlike(times) & sure


def worth(count: NDArray[np.float64] | int) -> NDArray[np.float64]:
    """How many times as much as is left is surely off, of so many weights."""
    return np.asarray(np.maximum(OFF, np.exp(2 * _CHANCE / count)))
