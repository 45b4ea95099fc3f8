"""GPTQ on a GPU: what qtool.methods.gptq does, its matrices on the device.

torch factors and inverts; the sweep goes by blocks of 128 columns. Within a block a kernel does the
same steps in the same order as the CPU's sweep; what a block owes to the columns after it is one
matrix product, whose sums are in an order of the device's own. So codes may differ from the CPU's
in a last step here and there; grids that are found before the sweep only as far as their importance
does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import grid, native, small_floats
from qtool.cuda import float_rounding, rounding
from qtool.cuda import quantize_tasks as tasks
from qtool.cuda.device import Device, host
from qtool.cuda.tasks import Task
from qtool.methods import gptq
from qtool.scheme import GroupQuant, Scheme


@dataclass(frozen=True)
class Factor:
    """gptq.Factor with U on the device, [in, in]."""

    upper: torch.Tensor
    order: NDArray[np.int32]
    importance: grid.Floats
    notes: tuple[str, ...] = ()

    @cached_property
    def on_host(self) -> gptq.Factor:
        """The same for the CPU's sweep, row major."""
        upper = np.ascontiguousarray(host(self.upper))
        return gptq.Factor(upper, self.order, self.importance, self.notes)


def factor(
    gram: torch.Tensor, options: gptq.Options, tokens: int | None = None, together: int = 1
) -> Factor:
    """gptq.factor of a Gram matrix [in, in] on a device."""
    root, prepared, notes = _damped_root(gram, options, tokens, together)
    cost = gptq.importance_of(root, prepared)
    upper = root.flip(0, 1)
    del root
    gptq.invert_upper(upper)
    return Factor(upper, prepared.order, cost, notes)


def importance(gram: torch.Tensor, options: gptq.Options, tokens: int | None) -> grid.Floats:
    """gptq.importance of a Gram matrix on a device."""
    root, prepared, _ = _damped_root(gram, options, tokens)
    return gptq.importance_of(root, prepared)


def _damped_root(
    gram: torch.Tensor, options: gptq.Options, tokens: int | None, together: int = 1
) -> tuple[torch.Tensor, gptq.Prepared, tuple[str, ...]]:
    prepared = gptq.prepare(host(gram.diagonal()).astype(np.float64), options, together)
    backwards = torch.from_numpy(prepared.backwards).to(gram.device)
    diagonal = torch.from_numpy(prepared.diagonal[prepared.backwards])

    def attempt(damping: float) -> torch.Tensor | None:
        damped = gram.index_select(0, backwards).index_select(1, backwards)
        damped /= prepared.mean
        damped.diagonal().copy_(diagonal + damping)
        root, failed = torch.linalg.cholesky_ex(damped)
        return root if not int(failed) and gptq.finite(root) else None

    root, notes = gptq.damped(attempt, prepared, options, tokens)
    return root, prepared, notes


def quantize_with(
    device: Device,
    weight: grid.Floats,
    given: Factor,
    scheme: Scheme,
    options: gptq.Options,
    largest: float | None = None,
) -> GroupQuant:
    """gptq.quantize_with on the device; the caller has it alone.

    QoQ's grids of two levels are swept on the CPU.
    """
    if scheme.outer == "rows":
        return gptq.quantize_with(weight, given.on_host, scheme, options)
    left, order = rounding.by_columns(device, weight), _order(device, given)
    if scheme.is_float:
        scales = small_floats.Search(given.importance) if options.mse else None
        quant = float_rounding.grids(device, left, scheme, largest, scales)
        left = left[order]
        return gptq.onto_levels(quant, partial(_onto_levels, device, left, given))
    columns = weight.shape[1]
    size = min(grid.group_width(scheme, columns), columns)
    static = options.static_groups or size == columns
    search = native.RangeSearch() if options.mse else None
    ratios = rounding.searched(device, search)
    cost = device.put(given.importance) if options.mse else None
    wanted = tasks.Grid(scheme.bits, scheme.symmetric, grid.reach(scheme.bits), scheme.scale_dtype)
    if static:
        pairs = rounding.grids(device, left, wanted, size, ratios, cost)
        groups = given.order // np.int32(size)
        if gptq.rounds_offsets(scheme, options):
            scale, zero = rounding.stored(pairs, scheme.scale_dtype)
            grid.check_scales(scale)
            quant = GroupQuant(scheme, np.empty(weight.shape, np.uint8), scale, zero)
            left = left[order]
            return gptq.onto_levels(quant, partial(_onto_levels, device, left, given))
    else:
        pairs = torch.empty(-(-columns // size), weight.shape[0], 2, device=device.place)
        groups = np.arange(columns, dtype=np.int32) // np.int32(size)
        cost = None if cost is None else cost[order]
    left = left[order]
    codes = torch.empty(left.shape, dtype=torch.uint8, device=device.place)
    index = device.put(groups)
    onto = partial(tasks.sweep_block, bits=scheme.bits)
    for start, stop in _blocks(columns, columns if static else size):
        if not static and start % size == 0:
            group = slice(start, min(start + size, columns))
            weighed = None if cost is None else cost[group]
            found = rounding.grids(device, left[group], wanted, size, ratios, weighed)
            pairs[start // size] = found[0]
        made = _swept(device, left, given.upper, pairs, index, slice(start, stop), onto)
        codes[order[start:stop]] = made
    scale, zero = rounding.stored(pairs, scheme.scale_dtype)
    grid.check_scales(scale)
    g_idx = None
    if options.act_order and not static:
        g_idx = np.empty(columns, np.int32)
        g_idx[given.order] = groups
    return GroupQuant(scheme, host(codes.T.contiguous()), scale, zero, g_idx)


def codes_on_levels(
    device: Device, weight: grid.Floats, given: Factor, levels: native.Levels
) -> NDArray[np.uint8]:
    """native.gptq_sweep_levels of float32 weight [out, in] on the device; the caller has it alone.

    Levels that depend on each other (Levels.points): `codes_at_points`.
    """
    left = rounding.by_columns(device, weight)[_order(device, given)]
    return _onto_levels(device, left, given, levels)


def _onto_levels(
    device: Device, left: torch.Tensor, given: Factor, levels: native.Levels
) -> NDArray[np.uint8]:
    """The same of a matrix [in, out] that is there, its columns in the order of the sweep; written
    over."""
    assert levels.points is None
    columns, order = len(left), _order(device, given)
    index = device.put(given.order // np.int32(levels.width))
    offset = np.zeros_like(levels.scale) if levels.offset is None else levels.offset
    pairs = torch.stack([device.put(one).T for one in (levels.scale, offset)], dim=-1)
    numbers, consecutive = tasks.in_order(levels.book)
    onto = partial(tasks.sweep_onto_levels, book=device.put(numbers), consecutive=consecutive)
    codes = torch.empty(left.shape, dtype=torch.uint8, device=device.place)
    for start, stop in _blocks(columns, columns):
        made = _swept(device, left, given.upper, pairs, index, slice(start, stop), onto)
        codes[order[start:stop]] = made
    return host(codes.T.contiguous())


def _order(device: Device, given: Factor) -> torch.Tensor:
    return torch.from_numpy(given.order.astype(np.int64)).to(device.place)


def codes_at_points(
    device: Device, weight: grid.Floats, given: Factor, levels: native.Levels, threads: int
) -> NDArray[np.uint8]:
    """The same of levels with points: the CPU chooses those of a block of columns, and the device
    makes the columns after it pay. The caller need not have the device.

    Of a block with weights W [n, out], as those before it left them, and what they become, Q, the
    errors E are those of one triangle of the factor: W - Q = U' E.
    """
    assert levels.points is not None
    unit, codes = levels.points.together, np.empty(weight.shape, np.uint8)
    with device.alone, device.explained():
        left = rounding.by_columns(device, weight)[_order(device, given)]
    for start, stop in _blocks(weight.shape[1], weight.shape[1]):
        block, rest = slice(start, stop), slice(stop, None)
        columns = given.order[block]
        groups = columns[::unit] // np.int32(levels.width)
        offset = None if levels.offset is None else np.ascontiguousarray(levels.offset[:, groups])
        own = replace(
            levels, width=unit, scale=np.ascontiguousarray(levels.scale[:, groups]), offset=offset
        )
        with device.alone, device.explained():
            corner = given.upper[block, block]
            here, there = host(left[block].T.contiguous()), host(corner.contiguous())
        found = native.gptq_sweep_levels(here, there, levels=own, threads=threads)
        codes[:, columns] = found
        values = own.values(found)
        with device.alone, device.explained():
            lost = left[block] - device.put(values).T
            errors = torch.linalg.solve_triangular(corner.T, lost, upper=False)
            left[rest].addmm_(given.upper[block, rest].T, errors, alpha=-1)
    return codes


def _blocks(columns: int, size: int) -> Iterator[tuple[int, int]]:
    """Blocks of columns, none of which lies in two groups of `size`."""
    start = 0
    while start < columns:
        stop = min(start + tasks.MOST_IN_BLOCK, (start // size + 1) * size, columns)
        yield start, stop
        start = stop


def _swept(
    device: Device,
    left: torch.Tensor,
    upper: torch.Tensor,
    pairs: torch.Tensor,
    index: torch.Tensor,
    block: slice,
    onto: Callable[..., Task],
) -> torch.Tensor:
    """The codes of a block of columns, uint8 [n, out]; those after it in `left` pay for it."""
    count = block.stop - block.start
    factor = upper.new_zeros(count, tasks.padded(count))
    factor[:, :count] = upper[block, block].T
    out = upper.new_empty(2, count, left.shape[1])
    weight, groups = rounding.aligned(left[block]), rounding.aligned(index[block])
    device.launch(onto(weight, factor, pairs, groups, out=out))
    left[block.stop :].addmm_(upper[block, block.stop :].T, out[0])
    return out[1].to(torch.uint8)
