"""Blocks of GGUF whose scales are tuned: the float16 numbers in each block that all its weights are
multiples of, or all its minima. What lies where is told beside the kernels that read it
(kernels/gguf_dequant_simple.h, gguf_dequant_k.h, gguf_dequant_iq.h)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.gguf.planned import PlannedTensor
from qtool.gguf_types import BlockType
from qtool.methods.tune import Scales
from qtool.streaming.stream import LoadedBlock

# Bytes of a block at which its scale begins, and that of its minima where it has one. Of IQ1_M the
# bits of the scale lie scattered; types with scales that are powers of two have none to move.
FIELDS: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ1_S": (0,),
}  # fmt: skip
_RUN = 16  # weights that share a minimum in any type; some types have 32
_LARGEST = np.float32(65504.0)


@dataclass(frozen=True)
class BlockMatrix:
    """One matrix, or several in one tensor, as blocks."""

    blocks: NDArray[np.uint8]  # [rows, bytes of a row]
    type: BlockType
    shape: tuple[int, ...]  # as the checkpoint has it, input features last

    def scales(self) -> Scales:
        """Of each block, at zero."""
        fields, width = FIELDS[self.type.name], self.shape[-1]
        rows = len(self.blocks)
        offset = None
        if len(fields) > 1:  # what is left of weights without the scale
            minima = self.blocks.copy()
            self._halves(minima)[..., fields[0] // 2] = 0
            alone = native_gguf.dequantize(minima, self.type, width, threads=1)
            offset = torch.from_numpy(np.ascontiguousarray(alone[:, ::_RUN]))
        return Scales(torch.zeros(len(fields), rows, width // self.type.weights), offset=offset)

    def tuned(self, scales: Scales) -> "BlockMatrix":
        """With scales where they came to be; none becomes infinite."""
        blocks = self.blocks.copy()
        halves = self._halves(blocks)
        for start, moved in zip(FIELDS[self.type.name], scales.moved.exp().numpy(), strict=True):
            wide = halves[..., start // 2].view(np.float16).astype(np.float32) * moved
            halves[..., start // 2] = (
                wide.clip(-_LARGEST, _LARGEST).astype(np.float16).view(np.uint16)
            )
        return replace(self, blocks=blocks)

    def dequantize(self) -> NDArray[np.float32]:
        """float32, in the checkpoint's shape."""
        found = native_gguf.dequantize(self.blocks, self.type, self.shape[-1], threads=1)
        return np.asarray(found.reshape(self.shape), np.float32)

    def _halves(self, blocks: NDArray[np.uint8]) -> NDArray[np.uint16]:
        """A view of blocks as pairs of bytes, [rows, blocks of a row, pairs]."""
        return blocks.reshape(len(blocks), -1, self.type.nbytes).view(np.uint16)


@dataclass(frozen=True)
class Place:
    """Where the rows of a tensor are in a decoder block."""

    tensor: PlannedTensor
    rows: tuple[tuple[str, tuple[int, ...], NDArray[np.int64]], ...]  # by checkpoint name: its
    # shape, and which rows of the tensor its rows are

    def parted(self, blocks: NDArray[np.uint8]) -> dict[str, BlockMatrix]:
        """The tensor's blocks [rows, bytes of a row], by checkpoint name and in its order."""
        type_ = self.tensor.type
        return {name: BlockMatrix(blocks[rows], type_, shape) for name, shape, rows in self.rows}

    def joined(self, matrices: Mapping[str, BlockMatrix]) -> NDArray[np.uint8]:
        """The reverse."""
        total = sum(len(rows) for _, _, rows in self.rows)
        row_bytes = self.tensor.type.row_bytes(self.tensor.source.in_features)
        blocks = np.empty((total, row_bytes), np.uint8)
        for name, _, rows in self.rows:
            blocks[rows] = matrices[name].blocks
        return blocks


def place_of(tensor: PlannedTensor, block: LoadedBlock) -> Place | None:
    """None of a tensor whose type has no scale to move, or whose rows do not lie as rows there."""
    source = tensor.source
    if tensor.type.name not in FIELDS or source.growth is not None:
        return None
    at = np.arange(source.rows, dtype=np.int64)
    if source.order is not None:
        at = source.order(at)
    found = []
    start = 0
    for name in source.origin:
        there = block.weights.get(name)
        if there is None or not there.is_contiguous():
            return None
        count = there[..., 0].numel()
        own = np.flatnonzero((at >= start) & (at < start + count))
        # Of the tensor's rows those of this name, in the order that it has them.
        found.append((name, tuple(there.shape), own[np.argsort(at[own])]))
        start += count
    whole = sum(len(rows) for _, _, rows in found) == source.rows == start
    return Place(tensor, tuple(found)) if whole else None
