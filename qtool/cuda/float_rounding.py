"""Small floats on a device: what `qtool.small_floats` makes, bit for bit.

Tensors here lie column after column, [in, out], as the kernels read them, scales as float32
[groups, rows of scales].
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import grid, small_floats
from qtool.cuda import round_tasks as tasks
from qtool.cuda.device import Device, host
from qtool.cuda.rounding import aligned, by_columns
from qtool.scheme import GroupQuant, Scheme
from qtool.small_floats import Search

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Grids:
    """Scales of a matrix [in, out], on the device."""

    scheme: Scheme
    scale: torch.Tensor
    outer: float | None
    width: int  # columns, and rows, of one
    height: int

    @property
    def divisor(self) -> float:
        """What scales are divided by."""
        return 1.0 if self.outer is None else self.outer


def quantize(
    device: Device,
    weight: Floats,
    scheme: Scheme,
    largest: float | None = None,
    search: Search | None = None,
    threads: int | None = None,
) -> GroupQuant:
    """As small_floats.quantize, in turn with other users of the device. threads: none are used."""
    with device.alone, device.explained():
        there = aligned(by_columns(device, weight))
        found = _grids(device, there, scheme, largest, search)
        codes = _rounded(device, there, found, torch.uint8)
        return _stored(found, host(codes.T.contiguous()))


def grids(
    device: Device,
    there: torch.Tensor,
    scheme: Scheme,
    largest: float | None = None,
    search: Search | None = None,
) -> GroupQuant:
    """As small_floats.grids, whose codes are all zero, of a matrix [in, out] that is there; the
    caller has it alone."""
    found = _grids(device, aligned(there), scheme, largest, search)
    return _stored(found, np.zeros((there.shape[1], there.shape[0]), np.uint8))


def rounded(device: Device, there: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """As small_floats.rounded, of a matrix [in, out] that is there; the caller has it alone."""
    there = aligned(there)
    return _rounded(device, there, _grids(device, there, scheme, None, None), torch.float32)


def _stored(found: Grids, codes: NDArray[np.uint8]) -> GroupQuant:
    scale = host(found.scale.T.contiguous())
    return small_floats.of_scales(found.scheme, codes, scale, found.outer)


def _grids(
    device: Device,
    there: torch.Tensor,
    scheme: Scheme,
    largest: float | None,
    search: Search | None,
) -> Grids:
    columns, rows = there.shape
    width = min(grid.group_width(scheme, columns), columns)
    height = rows if scheme.rows < 0 else scheme.rows
    tops = _largest_of_each(there, 0, width)
    if height > 1:
        tops = _largest_of_each(tops, 1, height)
    outer = None
    if scheme.rows < 0 and largest is not None:
        tops = torch.full_like(tops, largest)
    if scheme.outer:
        outer = small_floats.outer_of(float(tops.max()) if largest is None else largest, scheme)
    scale = torch.empty_like(tops)
    found = Grids(scheme, scale, outer, width, height)
    device.launch(
        tasks.scales_of(tops, scheme.book, scheme.scale_dtype, outer=found.divisor, out=scale)
    )
    tries = small_floats.tries_of(scheme, search is not None)
    if tries is None:
        return found
    importance = None
    if search is not None and search.importance is not None:
        importance = device.put(search.importance)
    factors = device.put(np.asarray(tries.factors, np.float32)) if tries.factors else None
    steps = device.put(np.asarray(tries.steps, np.int32)) if tries.steps else None
    device.launch(
        tasks.search(
            there, scale, scheme.book, width, factors=factors, steps=steps, outer=found.divisor,
            importance=importance, out=tops,
        )
    )  # fmt: skip
    return replace(found, scale=tops)


def _rounded(device: Device, there: torch.Tensor, found: Grids, dtype: torch.dtype) -> torch.Tensor:
    """Codes of a matrix (uint8), or what they stand for (float32), [in, out]."""
    out = torch.empty(there.shape, dtype=dtype, device=device.place)
    device.launch(
        tasks.round_weights(
            there, found.scale, found.scheme.book, found.width, found.height,
            outer=found.divisor, out=out,
        )
    )  # fmt: skip
    return out


def _largest_of_each(values: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """max|v| of each `count` neighbours on an axis, of fewer at its end."""
    whole = values.shape[axis] // count * count
    parts = []
    if whole:
        shape = (*values.shape[:axis], whole // count, count, *values.shape[axis + 1 :])
        cut = values.narrow(axis, 0, whole).reshape(shape)
        parts.append(_largest(cut, axis + 1))
    if whole < values.shape[axis]:
        rest = values.narrow(axis, whole, values.shape[axis] - whole)
        parts.append(_largest(rest, axis).unsqueeze(axis))
    return torch.cat(parts, axis).contiguous()


def _largest(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Without a copy of their size."""
    low, high = torch.aminmax(values, dim=axis)
    return torch.maximum(high, -low)
