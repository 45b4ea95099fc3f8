"""The equations of qtool.grid in numpy, which the C kernels are held to."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qtool.grid import group_width, ranges, reach
from qtool.native import RangeSearch
from qtool.scheme import GroupQuant, Scheme

Floats = NDArray[np.float32]


class Grid(NamedTuple):
    """The grids of all groups of a matrix."""

    scale: NDArray[np.float16]  # [out, groups]
    zero: NDArray[np.uint8]  # [out, groups]


def in_groups(weight: Floats, width: int) -> Floats:
    """[out, in] as [out, groups, width]; a last group that is too short is filled with zeros,
    which lie on every grid and change neither a range nor an error."""
    weight = np.pad(weight, ((0, 0), (0, -weight.shape[1] % width)))
    return weight.reshape(len(weight), -1, width)


def fit(weight: Floats, scheme: Scheme, ratio: float = 1.0) -> Grid:
    """The grid that covers this part of each group's full range."""
    grouped = in_groups(weight, group_width(scheme, weight.shape[1]))
    low, high = (end * np.float32(ratio) for end in ranges(grouped))
    levels = (1 << scheme.bits) - 1
    if scheme.symmetric:
        wide = np.maximum(-low, high) / np.float32(reach(scheme.bits))
    else:
        wide = (high - low) / np.float32(levels)
    scale = np.clip(wide, np.float32(2.0**-24), np.float32(65504.0)).astype(np.float16)
    scale[wide == 0] = 1
    if scheme.symmetric:
        return Grid(scale, np.full(scale.shape, 1 << (scheme.bits - 1), np.uint8))
    zero = np.clip(np.rint(-low / scale.astype(np.float32)), 0, levels)
    return Grid(scale, zero.astype(np.uint8))


def clipped(weight: Floats, scheme: Scheme) -> list[Grid]:
    """Those that a clip search tries, in order."""
    return [fit(weight, scheme, ratio) for ratio in RangeSearch().ratios]


def rounded(weight: Floats, grid: Grid, scheme: Scheme) -> GroupQuant:
    """The nearest codes."""
    steps = in_groups(weight, group_width(scheme, weight.shape[1])) / grid.scale[:, :, None]
    codes = np.rint(steps) + grid.zero[:, :, None].astype(np.float32)
    codes = np.clip(codes, 0, (1 << scheme.bits) - 1).astype(np.uint8)
    kept = codes.reshape(len(weight), -1)[:, : weight.shape[1]]
    return GroupQuant(scheme, kept, grid.scale, grid.zero)
