"""Rows rounded in parts, each with what those before it lost (qtool.blockwise.row_feedback)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.cuda.device import Device, host
from qtool.methods import gptq
from qtool.methods.tiles import Spread, in_turn
from qtool.streaming.single_thread import single_thread

Floats = NDArray[np.float32]
Rounded = Callable[[Floats, NDArray[np.int32]], Floats]  # of some rows, and which they are

_OPTIONS = gptq.Options(act_order=True, damp_percent=1.0, token_damping=False)
_PARTS = 64  # or more, in which rows are rounded, each before others compensate for it; of
_LEAST = 16  # so many rows, or a multiple
_BLOCK = 256  # rows after which all that are left are told


@dataclass(frozen=True)
class RowFactor:
    """H [out, out] of rows that several matrices have in common, factored."""

    upper: torch.Tensor  # where the rows are, or on the CPU
    order: NDArray[np.int32]

    @classmethod
    def of(cls, rows: torch.Tensor, spread: Spread, device: Device | None) -> "RowFactor":
        """rows: H, where the device has it."""
        if device is None:
            factor = gptq.factor(rows.numpy(), _OPTIONS, spread=spread)
            return cls(torch.from_numpy(np.asarray(factor.upper)), factor.order)
        from qtool.methods import gptq_device

        there = gptq_device.factor(rows, _OPTIONS)
        return cls(there.upper, there.order)


def factored(
    rows: Floats | RowFactor, spread: Spread = in_turn, device: Device | None = None
) -> RowFactor:
    """H [out, out], where it is not factored yet. It is as large as its factor: who has no other
    use for it lets it go."""
    if isinstance(rows, RowFactor):
        return rows
    there = torch.from_numpy(rows) if device is None else device.put(rows)
    return RowFactor.of(there, spread, device)


def rows_of_a_part(rows: int) -> int:
    """Of so many in all."""
    return max(_LEAST, rows // _PARTS // _LEAST * _LEAST)


def round_rows(
    weight: Floats,
    rows: Floats | RowFactor,
    rounded: Rounded,
    spread: Spread = in_turn,
    device: Device | None = None,
) -> None:
    """Round the rows of weight [out, in], part by part, each with what those before it lost.

    rows: as factored() has it. rounded: of some rows, and which they are, what becomes of each,
    whatever the others are. device: that updates the rows that remain; the caller has it alone.
    """
    rows = factored(rows, spread, device)
    upper, order = rows.upper, rows.order
    if device is not None:
        upper = upper.to(device.place)
    left = torch.from_numpy(np.ascontiguousarray(weight[order], np.float32)).to(upper.device)
    del weight  # a matrix of the caller's may be here alone
    size = rows_of_a_part(len(left))
    block = size * max(1, _BLOCK // size)
    owed = left.new_empty(min(block, len(left)), left.shape[1])  # by all behind a block
    with single_thread():
        for start in range(0, len(left), block):
            stop = min(len(left), start + block)
            for first in range(start, stop, size):
                last = min(stop, first + size)
                now = host(left[first:last])
                lost = torch.from_numpy(now - rounded(now, order[first:last])).to(upper.device)
                own = upper[first:last, first:last].T.contiguous()
                part = owed[first - start : last - start]
                part.copy_(torch.linalg.solve_triangular(own, lost, upper=False))
                left[last:stop] -= upper[first:last, last:stop].T @ part
            left[stop:] -= upper[start:stop, stop:].T @ owed[: stop - start]
