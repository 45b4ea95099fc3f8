"""GPTQ's sweep over rows of a matrix that becomes blocks of GGUF.

    weights -> blocks as llama.cpp's encoder makes them, with an importance between what an error in
               each column costs before others compensate for it and after
            -> their levels (scales and minima stay) -> the sweep's codes, put into the blocks

With the geometric mean of the two costs the output error of SmolLM2's matrices is up to 2 % lower
than with either. Scales fitted to the codes afterwards, by least squares under H's diagonal, raise
it: they undo what later columns compensated for.

In IQ1 to IQ3 columns that share a point or the number of signs are taken together, four or eight
at a time, and become what is nearest by each column's cost (kernels/lattice_body.h). In IQ2 and
IQ3 the strongest of these units first lowers the output error of SmolLM2's matrices by 3 to 18 %
against columns as they lie. Letting the columns of a unit compensate for each other when its point
is chosen, by trying every point with every sign, gains 1 % more, which is left; IQ3_S by fours
gains 3 % against eights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qtool import native, native_gguf
from qtool.gguf.gptq.levels import Levels, levels, put_codes
from qtool.gguf_types import BlockType
from qtool.methods import gptq

if TYPE_CHECKING:
    from qtool.cuda.device import Device
    from qtool.methods import gptq_device

Floats = NDArray[np.float32]
# Of weight [out, in], by at most so many threads, codes like it.
Choose = Callable[[Floats, Levels, int], NDArray[np.uint8]]

_LEAST = np.float32(1e-6)  # of the mean square: what always is zero is stored, too


@dataclass(frozen=True)
class Given:
    """What is known of the input of a matrix."""

    importance: Floats  # [in], that the encoder takes
    choose: Choose | None  # the sweep, with what is known; None where too little was seen of it


def unswept(square: Floats, count: int) -> Given:
    """Of an input that was hardly seen. square: [in], the sums of squares over `count` tokens."""
    if not count:  # as llama-quantize does
        return Given(np.ones_like(square), None)
    return Given(square / np.float32(count), None)


def swept(square: Floats, factor: gptq.Factor) -> Given:
    """Of any other, by the CPU."""
    return Given(_importance(square, factor.importance), partial(_chosen, factor))


def swept_on(device: "Device", square: Floats, factor: "gptq_device.Factor") -> Given:
    """The same on a device."""
    return Given(_importance(square, factor.importance), partial(_chosen_on, device, factor))


def _importance(square: Floats, cost: Floats) -> Floats:
    least = _LEAST * (square.mean() or np.float32(1))
    return np.sqrt(cost * np.maximum(square, least))


def _chosen(factor: gptq.Factor, weight: Floats, found: Levels, threads: int) -> NDArray[np.uint8]:
    upper, order = np.asarray(factor.upper), factor.order
    return native.gptq_sweep_levels(weight, upper, order=order, levels=found, threads=threads)


def _chosen_on(
    device: "Device", factor: "gptq_device.Factor", weight: Floats, found: Levels, threads: int
) -> NDArray[np.uint8]:
    from qtool.methods import gptq_device

    if found.points is not None:
        return gptq_device.codes_at_points(device, weight, factor, found, threads)
    with device.alone, device.explained():
        return gptq_device.codes_on_levels(device, weight, factor, found)


def blocks_of(
    weight: Floats, type_: BlockType, given: Given, threads: int = 1
) -> NDArray[np.uint8]:
    """Blocks of weight [out, in], uint8 [out, bytes of a row], whatever the number of threads. A
    weight that is too large for the type is not finite in what they stand for."""
    blocks = native_gguf.encode(weight, type_, given.importance, threads=threads)
    if given.choose is None:
        return blocks
    found = levels(blocks, type_, weight.shape[1])
    if all(np.isfinite(part).all() for part in (found.scale, found.offset) if part is not None):
        put_codes(blocks, type_, given.choose(weight, found, threads))
    return blocks
