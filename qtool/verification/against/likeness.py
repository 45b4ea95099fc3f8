"""A quantized matrix Q beside its source W, part by part: damage that the whole hardly shows.

    gain[o, g] = sum_g Q W / sum_g W W         of the weights of one row in one group

Rounding leaves it at 1, but for its noise, |Q - W| / |W| / sqrt(n); scales of another
group do not, though the error that they make is one that their size seems to explain.

Parts that are as far off as zeros, and unlike W, are looked for in tiles that pages of a file make,
where codes lie by rows (long and flat) or by columns (short and high). GPTQ takes columns of inputs
that hardly count as far off, but what it adds there has nothing to do with W: the gain stays.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.scheme import GroupQuant
from qtool.verification.against.side_by_side import Floats, SideBySide, sums_of_products
from qtool.verification.matrix import group_means

_TILES = ((1, 1024), (256, 8))  # rows, columns
_AS_ZEROS = 0.95  # relative error
_FAR = 3.0  # times the expected error
# How far from 1 the gain of a tile is that is another matrix's, or noise; or how small its cosine
# with W, where scales that were taken out have compensated for that.
_STRANGER, _ALIKE = 0.5, 0.15
# How far from 1, and from each other: four times what GPTQ and clipping make of 4 bits. Of fewer
# they make more: times the expected error.
_OFF, _SPREAD = 0.15, 0.08
_OFF_BY_CLIPPING, _SPREAD_BY_CLIPPING = 1.5, 0.75
_SURELY = 6  # times the noise that rounding explains
_LEAST = 1e-6  # of the mean square: parts of the source that are about 0 tell nothing
_DIGITS = {"BF16": 8, "F16": 11, "F32": 24, "F64": 53}
_CAST, _TINY = 2.0**-7, 2.0**-24  # what casting to float16 or bfloat16 may change
_STRANGE = 0.05  # of a row: what a scale of it leaves
_FEW = 256  # weights of a tile that say too little
# Of a matrix GPTQ takes single tiles as far off, of inputs that hardly count, the more the fewer
# bits there are: 5 of 576 of SmolLM2 at 2 bits, 1 of 864 at 3. A damaged page of a file has more of
# a small matrix, and what is less of a large one only digests tell.
COARSE = 0.16  # relative error that rounding explains
_BLIND = 0.5  # relative error from which on rounding itself leaves nothing of parts
_SHARES = 0.002, 0.03  # of all tiles: of fine matrices, of coarse ones


@dataclass(frozen=True)
class Likeness:
    """Gains weighed by their part of the source; tiles that have nothing in common with it."""

    gain: float  # the mean
    spread: float  # around it
    noise: float  # of a gain, as rounding explains it
    expected: float  # relative error
    torn: int  # tiles

    @property
    def scaled(self) -> bool:
        """Whether the whole is larger or smaller than the source."""
        return abs(self.gain - 1) > max(_OFF, _OFF_BY_CLIPPING * self.expected)

    @property
    def mixed(self) -> bool:
        """Whether its groups are, each by its own factor."""
        clipped = _SPREAD_BY_CLIPPING * self.expected
        return self.spread > max(_SPREAD, _SURELY * self.noise, clipped)

    @property
    def unlike(self) -> bool:
        """Whether anything of this tells of damage."""
        return self.scaled or self.mixed or self.torn > 0


@dataclass(frozen=True)
class Sums:
    """Of Q beside W: of W W, Q W, (W - Q)^2 and, by group, W - Q."""

    groups: Floats  # [4, out, groups]
    tiles: tuple[NDArray[np.float64], NDArray[np.float64]]  # [3, down, across], of each of _TILES

    @property
    def whole(self) -> float:
        """The sum of W W."""
        return float(self.tiles[0][0].sum())

    @property
    def lost(self) -> float:
        """The sum of (W - Q)^2."""
        return float(self.tiles[0][2].sum())

    @property
    def stored(self) -> float:
        """The sum of Q Q, of what it is where W is 0 altogether."""
        found = self.lost + float((2 * self.tiles[0][1] - self.tiles[0][0]).sum())
        return 0.0 if found <= 0 else found


def sums_of(quant: GroupQuant, pair: SideBySide) -> Sums:
    """Both matrices [out, in] read once, by rows."""
    out, columns = pair.shape
    width = quant.scheme.group_size if quant.scheme.group_size > 0 else columns
    (_, wide), (high, narrow) = _TILES
    groups = np.empty((4, out, quant.scale.shape[1]), np.float32)
    flat = np.empty((3, out, -(-columns // wide)))
    columns_of = np.zeros((3, -(-out // high), columns))
    for rows, stored, weight in pair.pieces():
        left = weight - stored
        pairs = (weight, weight), (weight, stored), (left, left), (left, None)
        for number, (one, other) in enumerate(pairs):
            if quant.g_idx is None:
                by_group, by_tile = sums_of_products(one, other, (width, wide))
            else:
                (by_tile,) = sums_of_products(one, other, (wide,))
                by_group = sums_by_group(quant, one if other is None else one * other)
            groups[number, rows] = by_group
            if other is not None:
                flat[number, rows] = by_tile
                columns_of[number, rows.start // high] += np.einsum("ij,ij->j", one, other)
    starts = np.arange(0, columns, narrow)
    return Sums(groups, (flat, np.add.reduceat(columns_of, starts, axis=2)))


def without_rows(sums: Sums, rows: Floats | None) -> Floats:
    """The sums of groups of the source as it was before its rows were multiplied by these."""
    if rows is None:
        return sums.groups
    whole, shared, lost = sums.groups[:3]
    by = rows[:, None]
    stored = lost + 2 * shared - whole
    whole, shared = whole / (by * by), shared / by
    return np.stack([whole, shared, stored - 2 * shared + whole])


def sums_by_group(quant: GroupQuant, values: Floats) -> NDArray[np.float64]:
    """Sums of values [out, in] over groups whose columns lie anywhere, [out, groups]."""
    return group_means(quant, values) * counts_of(quant)


def counts_of(quant: GroupQuant) -> NDArray[np.int64]:
    """The columns of each group, 1 where a damaged g_idx leaves none."""
    return np.maximum(np.bincount(quant.group_index(), minlength=quant.scale.shape[1]), 1)


def likeness(quant: GroupQuant, sums: Sums, expected: float) -> Likeness | None:
    """Q beside what it is near to. expected: the norm of W - Q. None where W is 0."""
    numbers = quant.codes.size
    whole = sums.whole / numbers
    if not 0 < whole < np.inf or not np.isfinite(sums.lost):
        return None
    counts = counts_of(quant).astype(np.float32)
    least = np.maximum(np.float32(_LEAST * whole) * counts, np.finfo(np.float32).tiny)
    size = np.maximum(sums.groups[0], least)
    gains = sums.groups[1] / size
    weights = size / np.float32(size.sum(dtype=np.float64))
    mean = float((weights * gains).sum(dtype=np.float64))
    spread = float(np.sqrt((weights * np.square(gains - np.float32(mean))).sum(dtype=np.float64)))
    relative = expected / float(np.sqrt(whole * numbers))
    noise = relative * float(np.sqrt((weights / counts).sum(dtype=np.float64)))
    far = max(_AS_ZEROS, _FAR * relative) ** 2
    torn = [
        _torn(parts, _sizes(quant.shape, tile), far, relative, _LEAST * whole, quant.shape[1])
        for parts, tile in zip(sums.tiles, _TILES, strict=True)
    ]
    return Likeness(mean, spread, noise, relative, max(torn) if relative < _BLIND else 0)


def _sizes(shape: tuple[int, int], tile: tuple[int, int]) -> NDArray[np.int64]:
    """How many weights each tile has, [down, across]."""
    down, across = (
        np.diff(np.arange(0, size, step), append=size)
        for size, step in zip(shape, tile, strict=True)
    )
    return np.outer(down, across)


def most_by_chance(tiles: int, expected: float) -> float:
    """How many tiles of so many GPTQ may take as far off as damage does."""
    return _SHARES[expected > COARSE] * tiles


def _torn(
    sums: NDArray[np.float64],
    numbers: NDArray[np.int64],
    far: float,
    expected: float,
    least: float,
    columns: int,
) -> int:
    """The tiles in which what is left is more than `far` times what was there, and nothing is as it
    was, where they are more than chance explains. sums: W W, Q W and (Q - W)^2 of tiles; numbers:
    how many weights they have."""
    there = np.maximum(sums[0], least * numbers)
    shared, lost = sums[1], sums[2]
    stored = np.maximum(lost + 2 * shared - there, least * numbers)
    strange = (np.abs(shared / there - 1) > _STRANGER) | (shared < _ALIKE * np.sqrt(there * stored))
    enough = numbers >= min(_FEW, columns)
    count = int(((lost > far * there) & strange & enough).sum())
    return count if count > most_by_chance(numbers.size, expected) else 0


def others(new: Floats, old: Floats, kinds: tuple[str, str]) -> NDArray[np.bool_]:
    """Which numbers are not the source's. kinds: the dtypes, of which the first may be too narrow
    for what the second holds."""
    kind, known = kinds
    reach = 0.0 if kind == known else _TINY
    rounded = _DIGITS[kind] < _DIGITS[known]
    return np.asarray(~(np.abs(new - old) <= reach + (_CAST * np.abs(old) if rounded else 0)))


def numbers_changed(new: Floats, old: Floats, kinds: tuple[str, str]) -> int | None:
    """How many numbers are others where the rest is the source's; None where there are none, or
    where the whole, or whole rows of it, were multiplied by something."""
    other = others(new, old, kinds)
    count = int(other.sum())
    if not 0 < count < other.size / 2:
        return None
    if old.ndim < 2:
        return count
    rows = other.reshape(-1, old.shape[-1])
    hit = np.flatnonzero(rows.any(axis=1))
    there = old.reshape(rows.shape)[hit]
    found = new.reshape(rows.shape)[hit]
    kept = ((there != 0) & ~rows[hit]).sum(axis=1) >= (there != 0).sum(axis=1) / 2
    size = np.square(there).sum(axis=1)
    with np.errstate(all="ignore"):
        scale = (there * found).sum(axis=1) / np.where(size > 0, size, 1)
        left = np.linalg.norm(found - scale[:, None] * there, axis=1)
        strange = ~(left <= _STRANGE * np.linalg.norm(found, axis=1)) | ~(scale > 0)
    return count if (kept | strange).any() else None
