"""Codes that are those of bytes of 0, where the source is far from what they stand for.

Stretches of a file that were never written, or lost, are 0: of a few bytes they hardly show in the
error of a matrix. Of integers 0 is the lowest code; of small floats, and of 8 bits where the
middle is 0, it is a weight of 0. Rounding leaves no weight far from there, and errors that GPTQ
hands on leave no more of them than at codes that are like it and no byte's default: the highest, or
the neighbours of a weight of 0. Far is, in steps, the most part of the way to the middle; of
weights of 0 the root of the mean square of those that share their scale, half of it of 8 bits.

What is 0 on purpose is left out: columns and rows that are 0 altogether, and pruned matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.float_codes import TABLES
from qtool.scheme import GroupQuant
from qtool.verification.against.likeness import Sums, counts_of
from qtool.verification.against.side_by_side import MOST_ROWS, Floats, SideBySide
from qtool.verification.against.steps import scales_of

_FAR = 0.6  # of the steps from the lowest code to the middle
_USUAL = {4: 1.0, 8: 0.5}  # by bits: of the root of the mean square
_STEPS = 4.0  # or steps from a weight of 0, where most that share its scale are smaller
# Weights, and times as many as at the other codes: where 0 is the lowest code, and where a weight
# of 0. GPTQ leaves twice as many of 4 bits, of 3 sometimes six times.
_LOWEST, _MIDDLE = (16, 6.0), (8, 4.0)
# Of fewer bits GPTQ takes many weights so far: only columns tell. Of the weights of one column in
# MOST_ROWS rows, by bits: more than GPTQ leaves of any (0.28, 0.05).
_COARSE = 3
_SHARE = {2: 0.4, 3: 0.15}
_OTHER_SHARE = 0.25
_ROUNDED = 0.75 / 12, 6e-4  # of step^2, and of small floats of 8 bits W W: rounding leaves more
_ALL, _MANY = 0.9, 0.3  # of a column or row, and of a matrix: 0 on purpose

Places = tuple[NDArray[np.int32], NDArray[np.int32]]  # rows, columns


@dataclass(frozen=True)
class Blanks:
    """Weights of codes of 0 that are far from the source."""

    weights: int
    where: str  # for messages


@dataclass(frozen=True)
class _Kind:
    """A code of zero bytes, and those that it is compared with."""

    number: int
    others: tuple[int, ...]
    lowest: bool  # of its range, not its middle


def blanks(quant: GroupQuant, pair: SideBySide, sums: Sums) -> Blanks | None:
    """What is lost of a matrix [out, in]; None where nothing is. sums: of the same pair."""
    for kind in _kinds(quant):
        lost, others = _found(quant, pair, sums, kind)
        if lost[0].size and (found := _judged(quant, kind, lost, others)):
            return found
    return None


def _kinds(quant: GroupQuant) -> Iterator[_Kind]:
    scheme = quant.scheme
    if not scheme.is_float:
        yield _Kind(0, ((1 << scheme.bits) - 1,), True)
    if scheme.is_float:
        yield _Kind(0, (1, 1 | 1 << (scheme.bits - 1)), False)
    elif scheme.bits == 8 and bool((quant.zero == 128).all()):
        yield _Kind(128, (127, 129), False)


def _bounds(part: GroupQuant, squares: Floats, kind: _Kind) -> tuple[Floats, Floats]:
    """Of some rows, how far is far, and the sum of squares that a group with such a weight has at
    the least, [rows, groups]. squares: those of the source's weights."""
    scheme = part.scheme
    step = np.abs(scales_of(part)).astype(np.float32)
    counts = counts_of(part).astype(np.float32)
    if kind.lowest:
        far = np.where(step > 0, np.float32(_FAR * (1 << (scheme.bits - 1))) * step, np.inf)
        rounded = np.float32(_ROUNDED[0]) * counts * np.square(step)
    else:
        least = np.float32(_STEPS * (TABLES[scheme.book][1] if scheme.is_float else 1.0))
        usual = np.float32(_USUAL[scheme.bits]) * np.sqrt(np.maximum(squares, 0) / counts)
        far = np.maximum(usual, least * step)
        far = np.where(far > 0, far, np.inf)
        rounded = np.float32(_ROUNDED[1] * (scheme.bits == 8)) * squares
    far = far.astype(np.float32)
    return far, np.square(far) + rounded


def _found(quant: GroupQuant, pair: SideBySide, sums: Sums, kind: _Kind) -> tuple[Places, Places]:
    """Where weights have the code and are far from what it stands for; the same of the others."""
    lost: list[Places] = []
    others: list[Places] = []
    for first in range(0, quant.shape[0], MOST_ROWS):
        last = min(first + MOST_ROWS, quant.shape[0])
        squares, left = sums.groups[0, first:last], sums.groups[2, first:last]
        far, least = _bounds(quant.rows(slice(first, last)), squares, kind)
        suspects = np.flatnonzero((left >= least).any(axis=1))
        if suspects.size:
            hit = first + suspects
            part, source = quant.rows(hit), pair.source(first, last)[suspects]
            for number, places in ((kind.number, lost), *((o, others) for o in kind.others)):
                rows, columns = _far_from(part, source, kind, number, far[suspects])
                places.append((hit[rows].astype(np.int32), columns.astype(np.int32)))
    return _joined(lost), _joined(others)


def _far_from(
    part: GroupQuant,
    source: NDArray[np.float32],
    kind: _Kind,
    number: int,
    far: NDArray[np.float32],
) -> Places:
    """Rows and columns of the weights with this number, farther from it than `far`."""
    at = np.flatnonzero(part.codes == number)
    rows = at // part.shape[1]
    columns = at - rows * part.shape[1]
    groups = part.group_index()[columns]
    weight = source[rows, columns]
    if not kind.lowest:
        is_far = np.abs(weight) > far[rows, groups]
    else:
        scale = scales_of(part)[rows, groups]
        if part.scheme.outer == "offset":
            stands_for = part.row_offset()[rows, groups] + number * scale
        else:
            stands_for = (number - part.row_zero()[rows, groups].astype(np.float32)) * scale
        inwards = np.where((scale < 0) == (number > 0), np.float32(1), np.float32(-1))
        is_far = (weight - stands_for) * inwards > far[rows, groups]
    return rows[is_far], columns[is_far]


def _joined(places: list[Places]) -> Places:
    if not places:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    rows, columns = zip(*places, strict=True)
    return np.concatenate(rows), np.concatenate(columns)


def _judged(quant: GroupQuant, kind: _Kind, lost: Places, others: Places) -> Blanks | None:
    if not kind.lowest:
        lost = _but_all_of_them(quant, kind, lost)
        told = lost[0].size >= _enough(_MIDDLE, others[0].size)
        told = told and not _is_pruned(quant.codes, kind.number)
    else:
        told = quant.scheme.bits > _COARSE and lost[0].size >= _enough(_LOWEST, others[0].size)
        if not told:
            lost = _by_columns(quant, lost, others)
            told = lost[0].size > 0
    return Blanks(lost[0].size, _where(lost)) if told else None


def _pieces(codes: NDArray[np.uint8], number: int) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
    """Some rows of a matrix at a time: which of their codes are this."""
    for first in range(0, len(codes), MOST_ROWS):
        rows = slice(first, first + MOST_ROWS)
        yield rows, codes[rows] == number


def _shares(codes: NDArray[np.uint8], number: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which rows, and which columns, have about nothing but this code."""
    of_rows, of_columns = np.empty(len(codes)), np.zeros(codes.shape[1])
    for rows, blank in _pieces(codes, number):
        of_rows[rows] = blank.mean(axis=1)
        of_columns += blank.sum(axis=0)
    return of_rows >= _ALL, of_columns >= _ALL * len(codes)


def _is_pruned(codes: NDArray[np.uint8], number: int) -> bool:
    """Whether many weights are 0, outside of rows and columns that are 0 altogether."""
    whole_rows, whole_columns = _shares(codes, number)
    kept = np.flatnonzero(~whole_columns)
    count = sum(
        int(blank[~whole_rows[rows]][:, kept].sum()) for rows, blank in _pieces(codes, number)
    )
    size = int((~whole_rows).sum()) * kept.size
    return size == 0 or count > _MANY * size


def _enough(least: tuple[int, float], others: NDArray[np.int64] | int) -> Any:
    """How many weights tell, beside so many at the other codes."""
    return least[0] + least[1] * others


def _but_all_of_them(quant: GroupQuant, kind: _Kind, lost: Places) -> Places:
    """Those in rows and columns that are not 0 altogether."""
    whole_rows, whole_columns = _shares(quant.codes, kind.number)
    kept = ~(whole_rows[lost[0]] | whole_columns[lost[1]])
    return lost[0][kept], lost[1][kept]


def _by_columns(quant: GroupQuant, lost: Places, others: Places) -> Places:
    """Those of columns of which so many are lost that no error that was handed on explains it."""
    out, columns = quant.shape
    down = -(-out // MOST_ROWS)

    def counts(places: Places) -> NDArray[np.int64]:
        at = places[0] // MOST_ROWS * columns + places[1]
        return np.bincount(at, minlength=down * columns)

    sizes = np.repeat(np.diff(np.arange(0, out, MOST_ROWS), append=out), columns)
    found = counts(lost)
    share = _SHARE.get(quant.scheme.bits, _OTHER_SHARE)
    torn = (found > share * sizes) & (found >= _enough(_LOWEST, counts(others)))
    kept = torn[lost[0] // MOST_ROWS * columns + lost[1]]
    return lost[0][kept], lost[1][kept]


def _where(lost: Places) -> str:
    """`columns 96 to 103, rows 128 to 400`."""
    return ", ".join(
        f"{what} {at.min()}" if at.min() == at.max() else f"{what}s {at.min()} to {at.max()}"
        for what, at in (("column", lost[1]), ("row", lost[0]))
    )
