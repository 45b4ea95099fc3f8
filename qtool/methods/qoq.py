"""QoQ, QServe's weights: INT8 rows, and inside them groups of INT4 whose scales are integers.

    s1     float16, one a row: max|w| / 119
    s2     1 to 16, one a group of w / s1; z, from 0 to 15
    w  ~   ((q - z) * s2) * s1        (q - z) * s2 stays in -128 .. 127 for every code

An engine makes the INT8 number (q - z) * s2 of each code before it multiplies, in registers of 8
bits: 119 is the largest reach of a row with which rounding s2 and q can never pass 127 (119 and
half a step of 16). Where a range is searched, codes that would pass it are not used.

Of one group a row (group_size -1) there is no s2: w ~ (q - z) * s1. Engines have float16 z * s1 for
such rows; s1 has 7 bits of precision here, with which this product of two numbers is exact.

The grids are found first, those with the least error among ranges that shrink, weighed like
`qtool.methods.gptq` weighs columns; `sweep` is then GPTQ's, on these grids.

Source: Lin et al., QServe, 2024, section 4.1.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qtool import grid
from qtool.errors import UnsupportedError
from qtool.scheme import GroupQuant, Scheme

Floats = NDArray[np.float32]

REACH = 119
LEVELS = 15  # codes are 0 to 15
LARGEST_SCALE = 16  # of a group: 2 * 119 / 15, rounded
LOWEST, HIGHEST = -128, 127
_PRECISION = 7  # bits of a row's scale that is multiplied with a zero of 4 bits, in float16's 11
_RATIOS = tuple(1.0 - 0.05 * step for step in range(11))
_CHUNK = 1 << 18  # elements worked on at once
_BLOCK = 128  # columns of a sweep whose errors reach the columns after them together


class Factor(Protocol):
    """What is read of qtool.methods.gptq.Factor."""

    @property
    def upper(self) -> NDArray[np.floating]: ...
    @property
    def order(self) -> NDArray[np.int32]: ...
    @property
    def importance(self) -> Floats: ...


@dataclass(frozen=True)
class Grids:
    """Of all groups of a matrix."""

    outer: NDArray[np.float16]  # [out]
    scale: Floats  # [out, groups], integers
    zero: NDArray[np.uint8]  # [out, groups]

    def limits(self) -> tuple[Floats, Floats]:
        """The least and the largest code of each group that stay in 8 bits, [out, groups]."""
        zero = self.zero.astype(np.float32)
        low = np.maximum(0, zero - np.floor(-LOWEST / self.scale))
        high = np.minimum(LEVELS, zero + np.floor(HIGHEST / self.scale))
        return low, high


def quantize(weight: Floats, scheme: Scheme, importance: Floats | None, search: bool) -> GroupQuant:
    """weight [out, in] to the nearest codes. importance: [in], of a squared error in a column."""
    found = grids(weight, scheme, importance, search)
    width = grid.group_width(scheme, weight.shape[1])
    low, high = found.limits()
    codes = np.empty(weight.shape, np.uint8)
    for part in _parts(weight):
        grouped = weight[part].reshape(-1, found.scale.shape[1], width)
        steps = (found.outer[part, None].astype(np.float32) * found.scale[part])[:, :, None]
        zero = found.zero[part, :, None].astype(np.float32)
        value = np.clip(np.rint(grouped / steps) + zero, low[part, :, None], high[part, :, None])
        codes[part] = value.reshape(codes[part].shape)
    return _quant(scheme, codes, found)


def sweep(weight: Floats, given: Factor, scheme: Scheme, search: bool) -> GroupQuant:
    """weight [out, in] to codes; what rounding a column loses, those after it compensate for."""
    import torch  # here, since rounding to nearest reads this file and needs none

    from qtool.streaming.single_thread import single_thread

    found = grids(weight, scheme, given.importance, search)
    width = grid.group_width(scheme, weight.shape[1])
    order, upper = given.order, torch.from_numpy(np.asarray(given.upper, np.float32))
    limits = found.limits()
    # By columns, so that each is one run of memory: [in, out] and [groups, out].
    left = torch.from_numpy(np.ascontiguousarray(weight.T[order]))
    scale, zero, low, high = (
        torch.from_numpy(np.ascontiguousarray(one.T.astype(np.float32)))
        for one in (found.scale, found.zero, *limits)
    )
    outer = torch.from_numpy(found.outer.astype(np.float32))
    columns = len(order)
    codes = torch.empty(left.shape, dtype=torch.uint8)
    with single_thread():
        for start in range(0, columns, _BLOCK):
            stop = min(start + _BLOCK, columns)
            errors = torch.empty(stop - start, left.shape[1])
            for place in range(start, stop):
                group = int(order[place]) // width
                code = (left[place] / (outer * scale[group])).round_().add_(zero[group])
                code = torch.minimum(torch.maximum(code, low[group]), high[group])
                codes[int(order[place])] = code.to(torch.uint8)
                value = ((code - zero[group]) * scale[group]) * outer
                error = (left[place] - value) / upper[place, place]
                errors[place - start] = error
                left[place + 1 : stop].addr_(upper[place, place + 1 : stop], error, alpha=-1)
            left[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    return _quant(scheme, np.ascontiguousarray(codes.numpy().T), found)


def grids(weight: Floats, scheme: Scheme, importance: Floats | None, search: bool) -> Grids:
    """The grids with the least error; without search those that cover each group's range."""
    rows, columns = weight.shape
    width = grid.group_width(scheme, columns)
    groups = columns // width
    outer = np.empty(rows, np.float16)
    scale = np.ones((rows, groups), np.float32)
    zero = np.empty((rows, groups), np.uint8)
    cost = np.ones(columns, np.float32) if importance is None else importance
    for part in _parts(weight):
        if scheme.group_size > 0:
            outer[part] = _row_scale(np.abs(weight[part]).max(1) / np.float32(REACH))
            steps: Floats = outer[part].astype(np.float32)
            inner: Floats = weight[part] / steps[:, None]
            grouped: Floats = inner.reshape(-1, groups, width)
            scale[part], zero[part] = _whole(grouped, cost.reshape(groups, width), search)
        else:
            outer[part], zero[part, 0] = _alone(weight[part], cost, search)
    return Grids(outer, scale, zero)


def _parts(weight: Floats) -> list[slice]:
    rows, columns = weight.shape
    step = max(1, _CHUNK // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _row_scale(wanted: Floats) -> NDArray[np.float16]:
    """In float16; 1 for a row of zeros."""
    if not (wanted < 65504).all():
        raise UnsupportedError(
            f"row {int(np.argmax(wanted))} needs a larger scale than float16 holds (65504); leave "
            "this tensor dense with an override in the recipe"
        )
    found = np.maximum(wanted, np.float32(2.0**-24)).astype(np.float16)
    found[wanted == 0] = 1
    return found


def _whole(grouped: Floats, cost: Floats, search: bool) -> tuple[Floats, NDArray[np.uint8]]:
    """Scales and zeros of groups [rows, groups, width] of numbers up to 119. cost: [groups,
    width]."""
    low, high = grid.ranges(grouped)
    best = np.full(low.shape, np.inf, np.float32)
    scale, zero = np.ones_like(low), np.zeros(low.shape, np.uint8)
    for ratio in _RATIOS if search else (1.0,):
        step = (high - low) * np.float32(ratio / LEVELS)
        trial = np.clip(np.rint(step), 1, LARGEST_SCALE)
        middle = np.clip(np.rint(-low * np.float32(ratio) / trial), 0, LEVELS)
        least = np.maximum(0, middle - np.floor(-LOWEST / trial))[:, :, None]
        most = np.minimum(LEVELS, middle + np.floor(HIGHEST / trial))[:, :, None]
        code = np.clip(np.rint(grouped / trial[:, :, None]) + middle[:, :, None], least, most)
        lost = (code - middle[:, :, None]) * trial[:, :, None] - grouped
        error = (lost * lost * cost).sum(-1)
        better = error < best
        best[better] = error[better]
        scale[better], zero[better] = trial[better], middle[better].astype(np.uint8)
    return scale, zero


def _alone(
    weight: Floats, cost: Floats, search: bool
) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Scales and zeros of whole rows [rows, in]."""
    low, high = (one[:, 0] for one in grid.ranges(weight[:, None, :]))
    best = np.full(low.shape, np.inf, np.float32)
    scale, zero = np.ones(low.shape, np.float16), np.zeros(low.shape, np.uint8)
    for ratio in _RATIOS if search else (1.0,):
        trial = _row_scale(_short((high - low) * np.float32(ratio / LEVELS)))
        step = trial.astype(np.float32)
        middle = np.clip(np.rint(-low * np.float32(ratio) / step), 0, LEVELS)
        code = np.clip(np.rint(weight / step[:, None]) + middle[:, None], 0, LEVELS)
        lost = (code - middle[:, None]) * step[:, None] - weight
        error = (lost * lost * cost).sum(-1)
        better = error < best
        best[better] = error[better]
        scale[better], zero[better] = trial[better], middle[better].astype(np.uint8)
    return scale, zero


def _short(wanted: Floats) -> Floats:
    """Rounded up to _PRECISION bits; never so small that float16 has fewer."""
    fraction, exponent = np.frexp(np.maximum(wanted, np.float32(2.0**-14)))
    found = np.ldexp(np.ceil(np.ldexp(fraction, _PRECISION)), exponent - _PRECISION)
    return np.where(wanted == 0, np.float32(0), found.astype(np.float32))


def _quant(scheme: Scheme, codes: NDArray[np.uint8], found: Grids) -> GroupQuant:
    return GroupQuant(scheme, codes, found.scale, found.zero, outer_rows=found.outer)
