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
from qtool.verification.matrix import group_means

Floats = NDArray[np.float32]
_TILES = ((1, 1024), (256, 8))  # rows, columns
_AS_ZEROS = 0.95  # relative error
_FAR = 3.0  # times the expected error
# How far from 1 the gain of a tile is that is another matrix's, or noise; or how small its cosine
# with W, where scales that were taken out have made up for that.
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


def likeness(quant: GroupQuant, target: Floats, stored: Floats, expected: float) -> Likeness | None:
    """target: what Q is near to, [out, in]. expected: the norm of W - Q. None where W is 0."""
    left, squares = np.square(target - stored), np.square(target)
    whole = float(squares.mean(dtype=np.float64))
    if not 0 < whole < np.inf or not np.isfinite(left).all():
        return None
    counts = np.maximum(np.bincount(quant.group_index(), minlength=quant.scale.shape[1]), 1)
    size = np.maximum(group_means(quant, squares), _LEAST * whole)
    gains = group_means(quant, target * stored) / size
    weights = size * counts / (size * counts).sum()
    mean = float((weights * gains).sum())
    spread = float(np.sqrt((weights * np.square(gains - mean)).sum()))
    relative = expected / float(np.sqrt(whole * target.size))
    noise = relative * float(np.sqrt((weights / counts).sum()))
    far = max(_AS_ZEROS, _FAR * relative) ** 2
    parts = squares, left, target * stored
    torn = [_torn(parts, tile, far, relative, _LEAST * whole) for tile in _TILES]
    return Likeness(mean, spread, noise, relative, max(torn) if relative < _BLIND else 0)


def most_by_chance(tiles: int, expected: float) -> float:
    """How many tiles of so many GPTQ may take as far off as damage does."""
    return _SHARES[expected > COARSE] * tiles


def _torn(
    parts: tuple[Floats, Floats, Floats],
    tile: tuple[int, int],
    far: float,
    expected: float,
    least: float,
) -> int:
    """The tiles in which what is left is more than `far` times what was there, and nothing is as it
    was, where they are more than chance explains. parts: W W, (Q - W)^2 and Q W, [out, in]."""
    squares, left, common = parts
    rows, columns = squares.shape
    down, across = np.arange(0, rows, tile[0]), np.arange(0, columns, tile[1])

    def sums(values: Floats) -> NDArray[np.float64]:
        flat = np.add.reduceat(values, across, axis=1, dtype=np.float64)
        return np.asarray(np.add.reduceat(flat, down, axis=0))

    numbers = np.outer(np.diff(down, append=rows), np.diff(across, append=columns))
    there = np.maximum(sums(squares), least * numbers)
    lost, shared = sums(left), sums(common)
    stored = np.maximum(lost + 2 * shared - there, least * numbers)
    strange = (np.abs(shared / there - 1) > _STRANGER) | (shared < _ALIKE * np.sqrt(there * stored))
    count = int(((lost > far * there) & strange & (numbers >= min(_FEW, columns))).sum())
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
