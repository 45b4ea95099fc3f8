"""Round to nearest: every weight goes to the nearest point of its group's grid. No data needed.
Grids of integers are those of qtool.grid, those of small floats of qtool.small_floats.

With `clip`, the range of each group is first shrunk to what minimizes its squared error: the
error of the weights alone, or, where a Gram matrix H is given, e H_gg e' with H_gg the block of H
that belongs to the group, which is the output error but for what groups have to do with each
other. Groups wider than 256, and small floats, take the diagonal of H only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool import grid, native, small_floats
from qtool.methods import Result, qoq
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    from qtool.cuda.device import Device

NEEDS: frozenset[str] = frozenset()

_AT_ONCE = 1 << 18  # elements
_WIDEST_BLOCK = 256  # the search's cost per weight grows with it


class Stats(Protocol):
    """What is read of an input's statistics."""

    @property
    def gram(self) -> NDArray[np.floating] | None:
        """[in, in], or None where it was not collected."""


@dataclass(frozen=True)
class Options:
    """The recipe's `rtn:` table."""

    clip: bool = False  # shrink each group's range where that lowers the error
    largest: float | None = None  # max|w| over the matrices that share a scale with this one
    first_row: int = 0  # of these in their matrix, for messages


@dataclass(frozen=True)
class Rounding:
    """Who rounds to grids of integers with a scale for each group or row, and to small floats:
    these, or what gives the same bytes elsewhere."""

    groups: Callable[..., native.Groups] = native.quantize_groups
    floats: Callable[..., GroupQuant] = small_floats.quantize


ON_CPU = Rounding()


def quantize(
    weight: NDArray[np.float32],
    stats: Stats | None,
    scheme: Scheme,
    options: Options,
    threads: int = 1,
    rounding: Rounding = ON_CPU,
) -> Result:
    """weight [out, in] to codes. Raises UnsupportedError where a scale exceeds float16."""
    if scheme.outer == "rows":
        weighed = _cost(stats) if options.clip else None
        return Result(qoq.quantize(weight, scheme, weighed, options.clip))
    if scheme.outer == "after":
        return Result(by_rows(weight, scheme))
    if scheme.is_float:
        scales = small_floats.Search(_cost(stats)) if options.clip else None
        return Result(rounding.floats(weight, scheme, options.largest, scales, threads))
    if scheme.rows < 0:
        return _one_scale(weight, scheme, options, threads)  # one row is one thread of a GPU
    search = native.RangeSearch() if options.clip else None
    importance = blocks = None
    if search is not None and stats is not None and stats.gram is not None:
        width = grid.group_width(scheme, weight.shape[1])
        if width <= _WIDEST_BLOCK:
            blocks = diagonal_blocks(stats.gram, width)
        else:
            importance = _cost(stats)
    found = rounding.groups(
        np.ascontiguousarray(weight),
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        reach=grid.reach(scheme.bits),
        search=search,
        importance=importance,
        gram=blocks,
        scale_dtype=scheme.scale_dtype,
        threads=threads,
    )
    grid.check_scales(found.scale, options.first_row)
    quant = GroupQuant(scheme, found.codes, found.scale, found.zero)
    return Result(_onto_offsets(weight, quant) if scheme.outer == "offset" else quant)


def _cost(stats: Stats | None) -> NDArray[np.float32] | None:
    """Of a squared error in a column, [in], where that is known."""
    if stats is None or stats.gram is None:
        return None
    return np.ascontiguousarray(np.diagonal(stats.gram), dtype=np.float32)


def _onto_offsets(weight: NDArray[np.float32], quant: GroupQuant) -> GroupQuant:
    """Codes nearest with offsets as they are stored, rounded: of 8 bits that is up to a quarter of
    a step."""
    most, width = (1 << quant.scheme.bits) - 1, quant.scheme.group_size
    scale, offset = quant.scale.astype(np.float32)[:, :, None], quant.row_offset()[:, :, None]
    codes = np.empty_like(quant.codes)
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        steps = weight[part].reshape(-1, scale.shape[1], width) - offset[part]
        steps /= scale[part]
        codes[part] = np.clip(np.rint(steps), 0, most).reshape(-1, weight.shape[1])
    return replace(quant, codes=codes)


def rounding_on(device: "Device | None") -> Rounding:
    """What `quantize` is to round with on a device; None: the CPU."""
    if device is None:
        return ON_CPU
    from qtool.cuda import float_rounding, rounding

    return Rounding(
        partial(rounding.quantize_groups, device), partial(float_rounding.quantize, device)
    )


def by_rows(weight: NDArray[np.float32], scheme: Scheme) -> GroupQuant:
    """LLM.int8(): code = rint(w * (127 / s)), s the largest magnitude of a row, [out, in]. A row
    that is zero throughout gets scale 1."""
    largest = np.maximum(weight.max(1), -weight.min(1))
    largest[largest == 0] = 1
    # Below, 127 / s would be infinite.
    largest = np.maximum(largest, np.float32(2.0**-118))
    codes = np.empty(weight.shape, np.uint8)
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        rounded = np.rint(weight[part] * (np.float32(127) / largest[part, None]))
        codes[part] = (rounded + 128).astype(np.uint8)
    zero = np.full((len(weight), 1), 128, np.uint8)
    return GroupQuant(scheme, codes, largest[:, None], zero, None, float(np.float32(1 / 127)))


def _one_scale(
    weight: NDArray[np.float32], scheme: Scheme, options: Options, threads: int
) -> Result:
    """One scale for the matrix: all of it is one row."""
    row = np.ascontiguousarray(weight).reshape(1, -1)
    found = quantize(row, None, replace(scheme, rows=1), options, threads).quant
    return Result(GroupQuant(scheme, found.codes.reshape(weight.shape), found.scale, found.zero))


def diagonal_blocks(gram: NDArray[np.floating], width: int) -> NDArray[np.float32]:
    """The blocks of H that belong to groups of `width` columns, [groups, width, width].

    They are scaled to a mean diagonal of 1. What a short last group lacks is zero.
    """
    columns = gram.shape[0]
    blocks = np.zeros((-(-columns // width), width, width), np.float32)
    factor = np.float32(1 / (float(np.trace(gram, dtype=np.float64)) / columns or 1.0))
    for group, start in enumerate(range(0, columns, width)):
        part = gram[start : start + width, start : start + width]
        blocks[group, : part.shape[0], : part.shape[0]] = part * factor
    return blocks
