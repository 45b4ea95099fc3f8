"""The arithmetic of integer grids that every method shares: scales, zeros and codes of groups.

    asymmetric   scale = (max(w, 0) - min(w, 0)) / (2^b - 1)      zero = round(-min(w, 0) / scale)
    symmetric    scale = max|w| / reach                           zero = 2^(b-1)
    codes        q = clip(round(w / scale) + zero, 0, 2^b - 1)    w ~ (q - zero) * scale

Zero itself is always on the grid. A symmetric grid has one more step below zero than above, so
`reach` decides what the positive end loses: 2^(b-1) - 1/2 is GPTQ's convention (at most half a
step is cut off there, no more than rounding costs); at up to 4 bits 2^(b-1), which cuts a whole
step off but makes every step smaller, has the lower squared error on real weights (0.63, 0.80
and 0.91 times GPTQ's at 2, 3 and 4 bits; 1.02 times at 8). Only positive scales are used, since
not every engine takes negative ones.

Scales are rounded to their stored float16 before any zero or code is computed from them.
Rounding is to nearest, ties to even, everywhere.

This is the definition; `qtool.native` computes the same faster, and tests hold it to this.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.errors import UnsupportedError
from qtool.scheme import Scheme

Floats = NDArray[np.float32]
Scales = NDArray[np.float16]
Bytes = NDArray[np.uint8]

# Ratios of the full range that a clip search tries; below half nothing was ever chosen at 4 bits.
CLIP_RATIOS = tuple(1.0 - 0.025 * step for step in range(21))

_CHUNK = 1 << 18  # elements worked on at once: temporaries stay in the second-level cache


@dataclass(frozen=True)
class Grid:
    """The grids of all groups of a matrix."""

    scale: Scales  # [out, groups]
    zero: Bytes  # [out, groups]


def group_width(scheme: Scheme, columns: int) -> int:
    """Columns in a group: the whole row where the scheme says -1."""
    return scheme.group_size if scheme.group_size > 0 else columns


def in_groups(weight: Floats, width: int) -> Floats:
    """[out, in] as [out, groups, width]; a last group that is too short is filled with zeros,
    which lie on every grid and change neither a range nor an error."""
    rows, columns = weight.shape
    missing = -columns % width
    if missing:
        weight = np.pad(weight, ((0, 0), (0, missing)))
    return weight.reshape(rows, -1, width)


def from_range(low: Floats, high: Floats, scheme: Scheme) -> Grid:
    """The grid of each group from its range, low <= 0 <= high [out, groups].

    A group that is zero throughout gets scale 1, so that its codes equal its zero. A scale too
    small for float16 becomes the smallest one there is. One too large raises UnsupportedError.
    """
    levels = (1 << scheme.bits) - 1
    wide: NDArray[np.floating]
    if scheme.symmetric:
        wide = np.maximum(-low, high) / np.float32(reach(scheme.bits))
    else:
        wide = (high - low) / np.float32(levels)
    scale = np.clip(wide, np.float32(2.0**-24), np.float32(65504.0)).astype(np.float16)
    scale[wide == 0] = 1
    check_scales(scale)
    if scheme.symmetric:
        zero = np.full(scale.shape, 1 << (scheme.bits - 1), np.uint8)
    else:
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), 0, levels).astype(np.uint8)
    return Grid(scale, zero)


def reach(bits: int) -> float:
    """Steps from zero to max|w| on a symmetric grid."""
    half = float(1 << (bits - 1))
    return half if bits <= 4 else half - 0.5


def check_scales(scale: NDArray[np.floating], first_row: int = 0) -> None:
    """UnsupportedError where a scale [out, groups] was too large and is now float16's largest.
    first_row: of the matrix, where these are some of its rows."""
    if not (scale < 65504).all():
        row, group = np.argwhere(~(scale < 65504))[0]
        raise UnsupportedError(
            f"row {first_row + row}, group {group} needs a larger scale than float16 holds "
            "(65504); leave this tensor dense with an override in the recipe"
        )


def ranges(grouped: Floats) -> tuple[Floats, Floats]:
    """The range of each group with zero inside it: low <= 0 <= high, [out, groups]."""
    return np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)


def fit(weight: Floats, scheme: Scheme) -> Grid:
    """The grid that covers each group's full range."""
    low, high = ranges(in_groups(weight, group_width(scheme, weight.shape[1])))
    return from_range(low, high, scheme)


def fit_clipped(
    weight: Floats,
    scheme: Scheme,
    importance: Floats | None = None,
    ratios: tuple[float, ...] = CLIP_RATIOS,
) -> Grid:
    """The grid of each group with the least weighted squared error among shrunken ranges.

    importance [in] weighs the columns (the diagonal of the Gram matrix, say); the same for all
    rows. Ratios are tried in order; the first of equals wins, so a group that gains nothing keeps
    the first ratio.
    """
    rows, columns = weight.shape
    width = group_width(scheme, columns)
    weights = np.ones((1, columns), np.float32) if importance is None else importance[None, :]
    # Sums of up to thousands of squares: scaled to mean 1, they neither overflow nor vanish.
    mean = float(weights.mean(dtype=np.float64))
    weights = in_groups((weights / np.float32(mean or 1.0)).astype(np.float32), width)
    scale = np.empty((rows, weights.shape[1]), np.float16)
    zero = np.empty(scale.shape, np.uint8)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        grouped = in_groups(weight[start : start + step], width)
        low, high = ranges(grouped)
        best: Floats | None = None
        for ratio in ratios:
            trial = from_range(low * np.float32(ratio), high * np.float32(ratio), scheme)
            error = _rounding_error(grouped, trial, scheme.bits)
            error *= error
            error *= weights
            total = error.sum(-1)
            rows_here = slice(start, start + grouped.shape[0])
            if best is None:
                best = total
                scale[rows_here], zero[rows_here] = trial.scale, trial.zero
                continue
            better = total < best
            best[better] = total[better]
            scale[rows_here][better] = trial.scale[better]
            zero[rows_here][better] = trial.zero[better]
    return Grid(scale, zero)


def _rounding_error(grouped: Floats, grid: Grid, bits: int) -> Floats:
    """dequantized - weight, [out, groups, width]."""
    scale = grid.scale.astype(np.float32)[:, :, None]
    zero = grid.zero.astype(np.float32)[:, :, None]
    value = grouped / scale
    np.rint(value, out=value)
    np.clip(value, -zero, np.float32((1 << bits) - 1) - zero, out=value)
    value *= scale
    value -= grouped
    return value


def round_codes(weight: Floats, grid: Grid, scheme: Scheme) -> Bytes:
    """Nearest codes, uint8 [out, in]."""
    rows, columns = weight.shape
    width = group_width(scheme, columns)
    codes = np.empty((rows, columns), np.uint8)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        value = in_groups(weight[part], width) / grid.scale[part].astype(np.float32)[:, :, None]
        np.rint(value, out=value)
        value += grid.zero[part].astype(np.float32)[:, :, None]
        np.clip(value, 0, (1 << scheme.bits) - 1, out=value)
        codes[part] = value.reshape(value.shape[0], -1)[:, :columns]
    return codes


def snap(weight: Floats, grid: Grid, scheme: Scheme) -> Floats:
    """Each weight replaced by its nearest grid value, float32 [out, in]."""
    width = group_width(scheme, weight.shape[1])
    grouped = in_groups(weight, width)
    value = _rounding_error(grouped, grid, scheme.bits)
    value += grouped
    return value.reshape(value.shape[0], -1)[:, : weight.shape[1]]
