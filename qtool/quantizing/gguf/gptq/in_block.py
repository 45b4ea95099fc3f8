"""Rows of a GGUF tensor where a decoder block has them: taken before they are rounded, put back
after, in the block's own order and without what a file multiplies them by."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.gguf.pieces import floats_of
from qtool.gguf.planned import PlannedTensor
from qtool.streaming.stream import LoadedBlock

Floats = NDArray[np.float32]


def rows_before(
    block: LoadedBlock | None, tensor: PlannedTensor, first: int, count: int, moved: bool
) -> Floats:
    """Some rows of a tensor before they are rounded."""
    if block is not None and moved:
        return _taken(block, tensor, first, count)
    return floats_of(tensor, first, first + count)


def put_back(block: LoadedBlock, tensor: PlannedTensor, first: int, values: Floats) -> None:
    """Rows of a tensor, from `first` on, to where the decoder block has them."""
    growth = growth_of(tensor, first, len(values))
    values = values if growth is None else values / growth
    for there, at, own in _places(block, tensor, first, len(values)):
        there[at] = torch.from_numpy(values[own])


def _taken(block: LoadedBlock, tensor: PlannedTensor, first: int, count: int) -> Floats:
    """`count` rows of a tensor, from `first` on, as the decoder block has them."""
    values = np.empty((count, tensor.source.in_features), np.float32)
    for there, at, own in _places(block, tensor, first, count):
        values[own] = there[at].numpy()
    growth = growth_of(tensor, first, count)
    return values if growth is None else np.asarray(values * growth, np.float32)


def growth_of(tensor: PlannedTensor, first: int, count: int) -> Floats | None:
    """What some rows of a tensor are multiplied by, [count, 1]."""
    growth = tensor.source.growth
    if growth is None:
        return None
    return growth[:, None] if len(growth) == 1 else growth[first : first + count, None]


def _places(
    block: LoadedBlock, tensor: PlannedTensor, first: int, count: int
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...], NDArray[np.bool_]]]:
    """Where the decoder block has some rows of a tensor: a matrix, or several, the index there, and
    which of the rows these are."""
    source = tensor.source
    rows = np.arange(first, first + count, dtype=np.int64)
    if source.order is not None:
        rows = source.order(rows)
    start = 0
    for name in source.origin:
        there = block.weights[name]
        if source.cut is not None and source.cut.only_transposed:
            there = there.mT
        size = there[..., 0].numel()
        own = (rows >= start) & (rows < start + size)
        if own.any():
            place = torch.from_numpy(rows[own] - start)
            at = (place,) if there.ndim == 2 else (place // there.shape[1], place % there.shape[1])
            yield there, at, own
        start += size
