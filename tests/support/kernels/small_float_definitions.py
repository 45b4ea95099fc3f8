"""Scales of small floats as they are defined, in numpy: what kernels/round_floats.c has to find."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qtool.float_codes import TABLES, encode, nearest

Floats = NDArray[np.float32]
_LAST = 126  # the byte of e4m3's largest number


def best_scales(
    weight: Floats,
    scale: Floats,
    book: str,
    group_size: int,
    factors: Sequence[float] = (),
    steps: Sequence[int] = (),
    outer: float = 1.0,
    importance: Floats | None = None,
) -> Floats:
    """The first of those that leave the smallest squared error; weight [out, in], scale [out,
    groups]."""
    part = _in_groups(weight, group_size)
    weighed = None if importance is None else _in_groups(importance[None], group_size)
    best = scale.copy()
    with np.errstate(over="ignore"):
        least = _error(part, scale, book, outer, weighed)
        for other in _others(scale, factors, steps):
            error = _error(part, other, book, outer, weighed)
            best = np.where(error < least, other, best)
            least = np.minimum(error, least)
    return best


def codes_of(
    weight: Floats, scale: Floats, book: str, group_size: int, outer: float
) -> NDArray[np.uint8]:
    """The codes nearest to weights over their steps."""
    return encode(weight / _spread(weight, scale, group_size, outer), book)


def rounded(weight: Floats, scale: Floats, book: str, group_size: int, outer: float) -> Floats:
    """What these stand for."""
    step = _spread(weight, scale, group_size, outer)
    return nearest(weight / step, book) * step


def _spread(weight: Floats, scale: Floats, group_size: int, outer: float) -> Floats:
    step = scale / np.float32(outer)
    return np.repeat(step, group_size, axis=1)[:, : weight.shape[1]]


def _in_groups(values: Floats, group_size: int) -> Floats:
    """[group_size, rows, groups]; what a last group lacks is zero."""
    rows, columns = values.shape
    groups = -(-columns // group_size)
    whole = np.zeros((rows, groups * group_size), np.float32)
    whole[:, :columns] = values
    return np.ascontiguousarray(whole.reshape(rows, groups, group_size).transpose(2, 0, 1))


def _others(scale: Floats, factors: Sequence[float], steps: Sequence[int]) -> list[Floats]:
    if factors:
        return [np.maximum(scale * np.float32(f), np.float32(2.0**-127)) for f in factors]
    byte = encode(scale, "e4m3").astype(np.int16)
    return [TABLES["e4m3"][np.clip(byte + step, 1, _LAST)] for step in steps]


def _error(
    part: Floats, scale: Floats, book: str, outer: float, importance: Floats | None
) -> NDArray[np.float64]:
    step = scale / np.float32(outer)
    lost = nearest(part / step, book) * step - part
    lost *= lost
    if importance is not None:
        lost *= importance
    total = np.zeros(scale.shape)
    for weight in lost:  # one after the other, in float64
        total += weight
    return total
