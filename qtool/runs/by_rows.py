"""A matrix whose rows are quantized each by itself: read, rounded and packed some rows at a time,
so that it is in memory as the file will have it, and no more of it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qtool import methods
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.dequantize import dequantize
from qtool.methods import rtn
from qtool.methods.rtn import Rounding
from qtool.native import Groups
from qtool.planned import Planned
from qtool.planning.duration import REPORTED_ROWS
from qtool.planning.shapes import ROWS_AT_ONCE, rows_together
from qtool.recipe.recipe import Recipe
from qtool.runs import layer_errors
from qtool.runs.sink import check_values
from qtool.scheme import GroupQuant, Scheme
from qtool.streaming.weights import Rows, rows_of

if TYPE_CHECKING:
    from qtool.cuda.device import Device

Floats = NDArray[np.float32]
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]  # map, side by side or not


@dataclass(frozen=True)
class Rounded:
    """A matrix as it is stored, and what is to be told of it."""

    arrays: Mapping[str, NDArray[Any]]
    error: float  # norm of W - Q over the norm of W
    coarseness: float | None  # see layer_errors
    some: Floats  # evenly spaced rows [at most 256, in], and these as they are now
    back: Floats


def quantize_rows(
    planned: Planned,
    checkpoint: Checkpoint,
    make: Callable[[Floats, int], GroupQuant],
    pack: Callable[[Planned, GroupQuant], Mapping[str, NDArray[Any]]],
    each: Each = map,
    read: Rows | None = None,
    weights: int = ROWS_AT_ONCE,
) -> Rounded:
    """A matrix whose scales are each of one row, or of a few. make: quantizes some rows [n, in],
    told which the first is. pack: what a format stores of them. read: the rows, where parts of a
    view are not as good. weights: how many are worked on together.

    SourceError where a weight is not finite.
    """
    scheme, (rows, columns) = planned.action, planned.shape
    assert isinstance(scheme, Scheme) and scheme.rows > 0
    together = rows_together(scheme.rows)
    step = max(1, weights // columns // together) * together
    reported = np.linspace(0, rows - 1, min(REPORTED_ROWS, rows)).astype(np.int64)
    whole: list[_Whole] = []
    read = read or rows_of(checkpoint, planned.name, in_parts=True)

    def work(first: int) -> tuple[float, float, Floats, Floats]:
        last = min(rows, first + step)
        weight = read(first, last)
        check_values(weight.reshape(-1), first * columns, planned, checkpoint)
        with methods.named(planned.name):
            quant = make(weight, first)
        packed = pack(planned, quant)
        if first == 0:
            whole.append(_Whole(planned, packed))
        else:
            whole[0].put(first // step, packed)
        back = dequantize(quant)
        here = reported[(reported >= first) & (reported < last)] - first
        lost = weight - back
        return _squares(weight), _squares(lost), weight[here], back[here]

    firsts = range(0, rows, step)
    # The first rows make room for the others.
    sizes, losses, some, back = zip(work(0), *each(work, firsts[1:]), strict=True)
    kept, left, size = np.concatenate(some), np.concatenate(back), sum(sizes)
    error = sqrt(sum(losses) / size) if size else 0.0
    return Rounded(whole[0].arrays, error, layer_errors.coarseness(kept, left, scheme), kept, left)


def nearest(
    weight: Floats,
    first_row: int,
    scheme: Scheme,
    recipe: Recipe,
    rounding: Rounding,
    largest: float | None = None,
) -> GroupQuant:
    """Some rows rounded as a recipe rounds to nearest. largest: as rtn.Options has it."""
    options = rtn.Options(recipe.clips, largest, first_row)
    return rtn.quantize(weight, None, scheme, options, 1, rounding).quant


def side_by_side(device: "Device | None") -> Rounding:
    """rtn.rounding_on, for several threads at once: each has a stream while it uses the device, and
    none for what the CPU does before and after."""
    if device is None:
        return rtn.ON_CPU
    from qtool.cuda.lanes import Lanes

    lanes = Lanes(device)

    def groups(weight: Floats, **options: Any) -> Groups:
        with lanes.one() as lane:
            return rtn.rounding_on(lane).groups(weight, **options)

    def floats(weight: Floats, scheme: Scheme, *options: Any) -> GroupQuant:
        with lanes.one() as lane:
            return rtn.rounding_on(lane).floats(weight, scheme, *options)

    return Rounding(groups, floats)


class _Whole:
    """What is stored of all rows, as it is put together.

    Some rows belong somewhere along the axis on which the first of them are shorter than all. What
    has no such axis is the same for all rows, but for the shape of the matrix.
    """

    def __init__(self, planned: Planned, first: Mapping[str, NDArray[Any]]) -> None:
        shapes = {spec.name: spec.shape for spec in planned.outputs}
        self._first = {name: array.shape for name, array in first.items()}
        self.arrays = {n: np.empty(shapes[n], array.dtype) for n, array in first.items()}
        self._shape = planned.shape
        self.put(0, first)

    def put(self, number: int, part: Mapping[str, NDArray[Any]]) -> None:
        """The rows of a number, each as many as the first; from several threads."""
        for name, array in part.items():
            whole, first = self.arrays[name], self._first[name]
            axis = next((n for n, size in enumerate(first) if size < whole.shape[n]), None)
            if name.endswith(".weight_shape"):
                whole[:] = self._shape
            elif axis is None:
                whole[...] = array
            else:
                place = [slice(None)] * array.ndim
                start = number * first[axis]
                place[axis] = slice(start, start + array.shape[axis])
                whole[tuple(place)] = array


def _squares(values: Floats) -> float:
    with np.errstate(over="ignore"):  # what is infinite is told by who looks at the error
        return float((values * values).sum(dtype=np.float64))
