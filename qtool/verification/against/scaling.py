"""One matrix against its source, with scales that were folded into its columns or rows taken out
(see `fit`). That a scale which was found is also taken out somewhere is judged in `error`."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from qtool.scheme import GroupQuant
from qtool.streaming.weights import Rows
from qtool.verification.against.blanks import blanks
from qtool.verification.against.compared import LOST, Compared, Multiple
from qtool.verification.against.factors import (
    RECIPROCALS,
    are_reciprocals,
    multiple_of,
)
from qtool.verification.against.fit import MATCH, Fit, Scales, distance, fit
from qtool.verification.against.likeness import (
    Sums,
    counts_of,
    likeness,
    sums_of,
    without_rows,
)
from qtool.verification.against.off_scales import OffScale, likely_off, mended, one_of_two, single
from qtool.verification.against.off_scales import off_scales as find_off
from qtool.verification.against.pruned import Fours
from qtool.verification.against.side_by_side import Floats, SideBySide, rows_of_quant, square_of
from qtool.verification.against.steps import expected_error, single_codes

_SURELY = 6  # standard errors
# Of what is left where a zero is off, the mean square: in steps 16 times what rounding leaves, as
# GPTQ may; of the mean the part that is less than any number of codes that were lost leaves.
_MOVED, _LEFT = 16 / 12, 0.05
_PLAIN = 1.2  # times the expected error: no need to look for scales below
_FEW_CLIPPED = 0.01  # of the weights


def compare(name: str, quant: GroupQuant, source: Rows, norms: Mapping[str, Floats]) -> Compared:
    """source: its rows, of [out, in]. norms: of norms in reach that changed, the ratio [in]."""
    found = _mended(name, quant, source, norms)
    if found.multiple is None:
        return found
    if found.multiple.times == RECIPROCALS:
        quant = replace(quant, scale=1 / quant.scale.astype(np.float32))
        without = _mended(name, quant, source, norms)
    else:
        by = np.float32(found.multiple.times)
        without = _mended(name, quant, lambda first, last: by * source(first, last), norms)
    return replace(found, multiple=replace(found.multiple, without=without))


def _mended(name: str, quant: GroupQuant, source: Rows, norms: Mapping[str, Floats]) -> Compared:
    """As `compare`, single scales that are off mended."""
    found = _compared(name, quant, source, norms)
    off = single(found.off_scales)
    if not found.explained:  # scales that are far off may have led the search for folds astray
        off = _beside_folds(name, quant, source, norms) or off
    if not off:
        return found
    better = _compared(name, mended(quant, off), source, norms)
    every = (*off, *(one for one in better.off_scales if one.group is None))
    as_stored = found.plain_error if better.columns is None else found.error
    return replace(better, off_scales=every, as_stored=as_stored)


def _beside_folds(
    name: str, quant: GroupQuant, source: Rows, norms: Mapping[str, Floats]
) -> tuple[OffScale, ...]:
    """Single scales that are off, beside the folds of the matrix with all mended that seem so."""
    pair = SideBySide(quant.shape, rows_of_quant(quant), source)
    likely = likely_off(quant, sums_of(quant, pair).groups)
    if not likely:
        return ()
    c = _compared(name, mended(quant, likely), source, norms)
    sums = sums_of(quant, pair.scaled(c.columns, c.rows))
    return single(_off(quant, pair, sums, (c.columns, c.rows)))


def _compared(name: str, quant: GroupQuant, source: Rows, norms: Mapping[str, Floats]) -> Compared:
    """As `compare`, as it is stored."""
    pair = SideBySide(quant.shape, rows_of_quant(quant), source)
    lost = expected_error(quant)
    sums = plain_sums = sums_of(quant, pair)
    size, plain = math.sqrt(sums.whole), math.sqrt(sums.lost)
    if plain > _PLAIN * lost:
        lost = _with_clipped(quant, pair, lost)
    far = plain > _PLAIN * lost
    pruned = far and _is_pruned(pair)
    found: Fit | None = None
    if math.isfinite(plain) and ((far and not pruned) or norms):
        found = fit(pair, norms)
        if found.columns is not None or found.rows is not None:
            sums = sums_of(quant, pair.scaled(found.columns, found.rows))
    whole, left = math.sqrt(sums.whole), math.sqrt(sums.lost)
    zeros = math.sqrt(sums.stored)  # how far zeros are off
    scales: Scales = (found.columns, found.rows) if found else (None, None)
    multiple = multiple_of(found)
    by_norm = found is not None and found.norm is not None
    unfolded = without_rows(sums, found.rows) if found and by_norm else plain_sums.groups
    if far and are_reciprocals(quant, unfolded):
        multiple = Multiple(RECIPROCALS, True)
    off, step, lost_codes = _zeros_off(quant, sums)
    like = likeness(quant, sums, lost)
    return Compared(
        name,
        left / whole if whole else zeros,
        plain / size if size else zeros,
        lost / whole if whole else None,
        lost / size if size else None,
        found.columns if found else None,
        found.rows if found else None,
        found.norm if found else None,
        off,
        step,
        quant.scale.size,
        (found.without_rows if found else plain) / lost if lost else None,
        found.could if found else frozenset(),
        like=like,
        plainly_like=like if sums is plain_sums else likeness(quant, plain_sums, lost),
        pruned=pruned,
        lost_codes=lost_codes,
        as_columns=found.as_columns if found else None,
        multiple=multiple,
        taken=found.taken if found else {},
        off_scales=_off(quant, pair, sums, scales),
        blanks=None if pruned or left > LOST * whole else blanks(quant, pair.scaled(*scales), sums),
    )


def _off(quant: GroupQuant, pair: SideBySide, sums: Sums, scales: Scales) -> tuple[OffScale, ...]:
    """Single scales, with folds taken out. Rows that are no fold hold what is off in them."""
    columns, rows = scales
    if not are_even(rows):
        off = find_off(quant, pair.scaled(columns, rows), sums.groups)
        return off if quant.scale.shape[1] != 2 else one_of_two(off)
    return find_off(quant, pair.scaled(columns, None), without_rows(sums, rows))


def are_even(rows: Floats | None) -> bool:
    """Whether scales of rows are what clipping leaves, but for single ones."""
    return rows is None or distance(rows, np.ones_like(rows)) < MATCH


def _is_pruned(pair: SideBySide) -> bool:
    """Whether what is stored has the pattern, and the source has not."""
    whole = pair.shape[0] * pair.shape[1]
    stored, source = Fours(), Fours()
    for _, new, old in pair.pieces():
        stored, source = stored.with_rows(new), source.with_rows(old)
        if stored.is_not_of(whole):
            return False
    return stored.pruned and not source.pruned


def _with_clipped(quant: GroupQuant, pair: SideBySide, lost: float) -> float:
    """The expected error with that of a few weights beyond the ends of their range, where rounding
    explains all others: AutoRound's search clips weights of 8 bits that count little."""
    if quant.scheme.is_float:
        return lost
    top = (1 << quant.scheme.bits) - 1
    count, of_clipped, of_others = 0, 0.0, 0.0
    for rows, stored, weight in pair.pieces():
        codes = quant.codes[rows]
        ends = (codes == 0) | (codes == top)
        clipped = ends & (np.abs(weight) > np.abs(stored)) & (weight * stored >= 0)
        left = weight - stored
        count += int(clipped.sum())
        of_clipped += square_of(left[clipped])
        of_others += square_of(left[~clipped])
    if count > _FEW_CLIPPED * quant.codes.size or math.sqrt(of_others) > _PLAIN * lost:
        return lost
    return math.hypot(lost, math.sqrt(of_clipped))


def _zeros_off(quant: GroupQuant, sums: Sums) -> tuple[int, int, int]:
    """How many groups have a zero that is off by whole steps, and by how many most of them; and how
    many have a mean that is, by more than a zero explains: it moves all weights by the same.

    W - Q is (zero stored - zero meant) * scale on average, and 0 where they are the same, but for
    what is left by chance of the few weights of a group, which GPTQ leaves farther off.
    """
    if quant.scheme.is_float:
        return 0, 0, 0
    scale = quant.row_scale().astype(np.float64)
    count = counts_of(quant)
    means = sums.groups[3] / count
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scale != 0, means / scale, 0.0)
    steps = np.where(np.isfinite(steps), steps, 0.0)
    off = np.abs(steps) > 0.6
    if off.any():
        spread = sums.groups[2] / count - means**2
        chance = np.sqrt(np.maximum(spread, 0) / count)
        off &= np.abs(means) > _SURELY * chance
    if not off.any():
        return 0, 0, 0
    lost = off & (spread > np.maximum(_MOVED * np.square(scale), _LEFT * np.square(means)))
    lost |= off & single_codes(quant)
    off &= ~lost
    if not off.any():
        return 0, 0, int(lost.sum())
    whole, counts = np.unique(np.rint(steps[off]), return_counts=True)
    return int(off.sum()), int(whole[counts.argmax()]), int(lost.sum())
