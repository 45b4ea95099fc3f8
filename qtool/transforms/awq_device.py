"""AWQ's search on a GPU: the errors of qtool.transforms.awq, by the same formulas.

Sums are in another order than the CPU's, so that of two scales that are as good as each other the
other one may be chosen.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import grid
from qtool.cuda import float_rounding, rounding
from qtool.cuda.device import Device, host
from qtool.cuda.quantize_tasks import Grid
from qtool.scheme import Scheme

if TYPE_CHECKING:
    from qtool.transforms.awq import Measured


class Reader:
    """A matrix of awq.Measured on the device, [in, rows]."""

    def __init__(self, device: Device, measured: "Measured") -> None:
        self.device = device
        self.scheme: Scheme = measured.scheme
        self.share = measured.share
        self.weight = rounding.by_columns(device, measured.weight)
        self.importance = device.put(measured.importance).double()

    def diagonal_error(self, scale: torch.Tensor) -> torch.Tensor:
        """awq.diagonal_error, of one number."""
        error = self._error(scale).square_()
        cost = self.importance / scale.double().square()
        return error.sum(1, dtype=torch.float64) @ cost / self.share

    def output_error(self, scale: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
        """awq.output_error, of one number."""
        error = self._error(scale) / scale[:, None]
        return (gram @ error).mul_(error).sum(dtype=torch.float64) / self.share

    def _error(self, scale: torch.Tensor) -> torch.Tensor:
        """Q(W s) - W s, [in, rows], as awq._error has it."""
        scaled = self.weight * scale[:, None]
        if self.scheme.is_float:
            return float_rounding.rounded(self.device, scaled, self.scheme).sub_(scaled)
        bits, columns = self.scheme.bits, len(self.weight)
        size = min(grid.group_width(self.scheme, columns), columns)
        wanted = Grid(bits, self.scheme.symmetric, grid.reach(bits))
        pairs = rounding.grids(self.device, scaled, wanted, size)
        found = rounding.rounded(self.device, scaled, pairs, bits, size, torch.float32)
        return found.sub_(scaled)


def search(
    device: Device, measured: Sequence["Measured"], scales: Sequence[NDArray[np.float32]], most: int
) -> int:
    """awq.search: which of the scales has the least error; `most` are compared in full."""
    with device.alone, device.explained():
        readers = [Reader(device, one) for one in measured]
        there = [device.put(scale) for scale in scales]
        sums = [torch.stack([one.diagonal_error(scale) for one in readers]) for scale in there]
        errors = host(torch.stack(sums).sum(1))
        if any(one.gram is None for one in measured):
            return int(errors.argmin())
        best = [int(number) for number in np.argsort(errors, kind="stable")[:most]]
        finalists = sorted({0, *best})
        totals = [0.0] * len(finalists)
        grams = {id(one.gram): one.gram for one in measured if one.gram is not None}
        for key, array in grams.items():  # one of them there at a time
            gram = device.put(np.asarray(array, np.float32))
            for reader, one in zip(readers, measured, strict=True):
                for place, number in enumerate(finalists):
                    if id(one.gram) == key:
                        totals[place] += float(reader.output_error(there[number], gram))
            del gram
        return finalists[int(np.argmin(totals))]
