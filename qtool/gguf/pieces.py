"""Pieces of a GGUF file: a few hundred thousand weights of one tensor, the work of one thread.

    rows of the source -> float32 -> blocks of the planned type -> the file
                          finite?    dequantized and compared

A piece stays in the caches from its first step to its last, so memory does not depend on the size
of the model. Where the cuts are depends on shapes alone: no byte and no sum depends on the threads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np
from numpy.typing import NDArray

from qtool import native, native_gguf
from qtool.errors import FormatError, SourceError
from qtool.formats.gguf_writer import GgufWriter
from qtool.gguf.plan import PlannedTensor
from qtool.gguf_types import BF16, BY_NAME, F16, F32, BlockType
from qtool.native.sums import checksum, squares

PIECE_WEIGHTS = 1 << 17

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Piece:
    """Rows first to last of a tensor, all of one matrix where it has several (experts)."""

    tensor: int  # number in the order of writing
    matrix: int
    first: int
    last: int


@dataclass(frozen=True)
class Done:
    """What is known of a finished piece."""

    piece: Piece
    source_checksum: int
    checksum: int
    position: int
    nbytes: int
    size: float  # sum of the squared weights
    lost: float  # sum of the squared differences that quantizing made


def cut(tensors: Sequence[PlannedTensor]) -> Iterator[Piece]:
    """All pieces in the order of the file."""
    for number, tensor in enumerate(tensors):
        shape = tensor.source.shape
        rows = shape[-2] if len(shape) > 1 else 1
        step = max(1, PIECE_WEIGHTS // tensor.source.in_features)
        for matrix in range(prod(shape[:-2])):
            for first in range(0, rows, step):
                start = matrix * rows + first
                yield Piece(number, matrix, start, matrix * rows + min(rows, first + step))


class Encoder:
    """One thread's buffers, and the way of a piece through them."""

    def __init__(
        self,
        tensors: Sequence[PlannedTensor],
        importance: Sequence[Floats | None],
        writer: GgufWriter,
    ) -> None:
        """importance: [matrices, in] of each tensor that has some."""
        self._tensors, self._importance, self._writer = tensors, importance, writer
        widest = max((t.source.in_features for t in tensors), default=0)
        weights = max(PIECE_WEIGHTS, widest)
        self._values = np.empty(weights, np.float32)
        self._back = np.empty(weights, np.float32)
        self._blocks = np.empty(4 * weights, np.uint8)

    def piece(self, piece: Piece) -> Done:
        """Reads, encodes and writes it; SourceError, FormatError name the tensor."""
        tensor = self._tensors[piece.tensor]
        raw = tensor.source.read(piece.first, piece.last)
        values = self._floats(raw, tensor.source.type, self._values, tensor)
        size = lost = 0.0
        stored = raw
        if values is not None:
            size = squares(values)
            if not isfinite(size):
                raise SourceError(_not_finite(tensor, values, piece.first))
            if not tensor.copied:
                stored = self._encoded(tensor, piece, values)
                back = self._floats(stored, tensor.type, self._back, tensor)
                assert back is not None
                lost = squares(values, back)
                if not isfinite(lost):
                    raise FormatError(
                        f"{tensor.name}: weights up to {float(np.abs(values).max()):.4g} do not "
                        f"fit {tensor.type.name}; give the tensor another type with an override"
                    )
        position, nbytes = self._writer.rows(piece.tensor, piece.first, stored)
        return Done(piece, checksum(raw), checksum(stored), position, nbytes, size, lost)

    def _encoded(self, tensor: PlannedTensor, piece: Piece, values: Floats) -> NDArray[np.uint8]:
        rows, block = len(values), tensor.type
        if block == F32:
            return values.view(np.uint8)
        row_bytes = block.row_bytes(tensor.source.in_features)
        out = self._blocks[: rows * row_bytes].reshape(rows, row_bytes)
        if block == F16:
            native.to_float16(values, 1, out=out.view(np.float16))
        elif block == BF16:
            native.to_bfloat16(values, 1, out=out.view(np.uint16))
        else:
            factors = self._importance[piece.tensor]
            chosen = None if factors is None else factors[piece.matrix]
            native_gguf.encode(values, block, chosen, out=out, threads=1)
        return out

    def _floats(
        self, raw: NDArray[np.uint8], block: BlockType, buffer: Floats, tensor: PlannedTensor
    ) -> Floats | None:
        """float32 [rows, in] of stored rows; None where they are whole numbers."""
        rows, in_features = len(raw), tensor.source.in_features
        out = buffer[: rows * in_features].reshape(rows, in_features)
        if block == F32:
            return raw.view(np.float32)
        if block == F16:
            return native.from_float16(raw.view(np.float16), 1, out=out)
        if block == BF16:
            return native.from_bfloat16(raw.view(np.uint16), 1, out=out)
        if block.name in BY_NAME:
            return native_gguf.dequantize(raw, block, in_features, out=out, threads=1)
        return None


def _not_finite(tensor: PlannedTensor, values: Floats, first: int) -> str:
    row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
    origin = f" (from {', '.join(tensor.source.origin)})" if tensor.source.origin else ""
    return (
        f"{tensor.name}{origin}: the weight in row {first + row}, column {column} is "
        f"{float(values[row, column])}; the source is damaged, and nothing good can be made of it"
    )
