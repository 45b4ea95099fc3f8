"""Pieces of a GGUF file: a few hundred thousand weights of one tensor, the work of one thread.

    rows of the source -> float32 -> blocks of the planned type -> the file
                          finite?    dequantized and compared

A piece stays in the caches from its first step to its last, so memory does not depend on the size
of the model. Where the cuts are depends on shapes alone: no byte and no sum depends on the threads.
"""

from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.checkpoints.holes import torn, zero_stretches
from qtool.errors import FormatError, SourceError
from qtool.formats.gguf_writer import GgufWriter
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import SourceTensor, as_floats
from qtool.gguf_types import BY_NAME, FLOATS, BlockType
from qtool.native.sums import checksum

PIECE_WEIGHTS = 1 << 18
CACHED_WEIGHTS = 1 << 14  # as float32, twice, in the second cache of a core

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Piece:
    """Rows first to last of a tensor, all of one matrix where it has several (experts)."""

    tensor: int  # number in the order of writing
    matrix: int
    first: int
    last: int


class Pieces(Sequence[Piece]):
    """All pieces of a file in its order; each is made when it is asked for."""

    def __init__(self, tensors: Sequence[PlannedTensor]) -> None:
        self._tensors = tensors
        self._edges = [0]
        for tensor in tensors:
            matrices, rows = matrices_of(tensor)
            self._edges.append(self._edges[-1] + matrices * -(-rows // _step(tensor)))

    def __len__(self) -> int:
        return self._edges[-1]

    def of(self, tensor: int) -> slice:
        """The numbers of the pieces of a tensor."""
        return slice(self._edges[tensor], self._edges[tensor + 1])

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._edges, index) - 1
        tensor = self._tensors[number]
        step, (_, rows) = _step(tensor), matrices_of(tensor)
        matrix, part = divmod(index - self._edges[number], -(-rows // step))
        first, last = part * step, min(rows, (part + 1) * step)
        return Piece(number, matrix, matrix * rows + first, matrix * rows + last)


def matrices_of(tensor: PlannedTensor) -> tuple[int, int]:
    """How many there are, and the rows of one."""
    shape = tensor.source.shape
    return prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1


def _step(tensor: PlannedTensor) -> int:
    """Rows of a piece."""
    return max(1, PIECE_WEIGHTS // tensor.source.in_features)


class Done:
    """What is known of each finished piece, by its number."""

    def __init__(self, count: int) -> None:
        self.read = np.zeros(count, np.uint64)  # checksum of the source's bytes
        self.written = np.zeros(count, np.uint64)  # checksum of the file's bytes
        self.size = np.zeros(count)  # sum of the squared weights
        self.lost = np.zeros(count)  # sum of the squared differences that quantizing made
        self.holes = np.zeros(count, np.int64)  # bytes of the source's that are 0 in torn rows

    def of(self, numbers: slice) -> str:
        """All of that of some pieces, as text."""
        rows = (self.read, self.written, self.size, self.lost, self.holes)
        return b64encode(b"".join(row[numbers].tobytes() for row in rows)).decode()

    def put(self, numbers: slice, text: Any) -> bool:
        """The inverse of of(); False where `text` is of another number of pieces, or no such."""
        rows = (self.read, self.written, self.size, self.lost, self.holes)
        try:
            raw = b64decode(text, validate=True)
        except (TypeError, ValueError):
            return False
        count = numbers.stop - numbers.start
        if len(raw) != 8 * len(rows) * count:
            return False
        for place, row in enumerate(rows):
            row[numbers] = np.frombuffer(raw, row.dtype, count, 8 * count * place)
        return True


@dataclass(frozen=True)
class Given:
    """What tensors are encoded with: [matrices, in] of one, or None; and blocks of some of its
    rows, uint8 [last - first, bytes of a row], where they are made already."""

    importance: Callable[[PlannedTensor], Floats | None] = lambda _: None
    rows: Callable[[PlannedTensor, int, int], NDArray[np.uint8] | None] = lambda *_: None


class Encoder:
    """One thread's buffers, and the way of a piece through them."""

    def __init__(
        self,
        tensors: Sequence[PlannedTensor],
        pieces: Pieces,
        given: Given,
        writer: GgufWriter,
        done: Done,
    ) -> None:
        """done: is filled."""
        self._tensors, self._pieces, self._given = tensors, pieces, given
        self._writer, self._done = writer, done
        self._factors: tuple[int, Floats | None] = (-1, None)  # of the tensor at hand
        self._raw = np.empty(max((_most(t, t.source.type) for t in tensors), default=0), np.uint8)
        self._out = np.empty(max((_most(t, t.type) for t in tensors), default=0), np.uint8)
        self._scratch = np.empty(2 * cached_weights(tensors), np.float32)

    def __call__(self, number: int) -> None:
        """Reads, encodes and writes a piece; SourceError, FormatError name the tensor."""
        piece = self._pieces[number]
        tensor = self._tensors[piece.tensor]
        source, block = tensor.source, tensor.source.type
        raw = self._read(source, piece)
        stored, size, lost = raw, 0.0, 0.0
        made = self._given.rows(tensor, piece.first, piece.last)
        if made is not None:
            stored = made
            size, lost = _compared(tensor, piece, raw, made)
            check_sums(tensor, piece, raw, size, lost)
        elif block in FLOATS or block.name in BY_NAME:  # the rest are integers
            want = None if tensor.copied else tensor.type
            if want is not None:
                stored = _rows(self._out, len(raw), want.row_bytes(source.in_features))
            if self._factors[0] != piece.tensor:
                self._factors = piece.tensor, self._given.importance(tensor)
            factors = self._factors[1]
            chosen = None if factors is None else factors[piece.matrix]
            size, lost = native_gguf.convert(
                raw, block, want, source.in_features, chosen, stored, self._scratch
            )
            check_sums(tensor, piece, raw, size, lost)
        self._writer.rows(piece.tensor, piece.first, stored)
        done = self._done
        done.read[number] = checksum(raw)
        done.written[number] = done.read[number] if stored is raw else checksum(stored)
        done.size[number], done.lost[number] = size, lost
        done.holes[number] = hole_in(source, raw)

    def _read(self, source: SourceTensor, piece: Piece) -> NDArray[np.uint8]:
        if source.fill is None:
            return np.ascontiguousarray(source.read(piece.first, piece.last))
        row_bytes = source.type.row_bytes(source.in_features)
        out = _rows(self._raw, piece.last - piece.first, row_bytes)
        return source.fill(piece.first, piece.last, out)


def hole_in(source: SourceTensor, raw: NDArray[np.uint8]) -> int:
    """The bytes of some rows of a matrix [n, bytes of a row] that are 0 in long stretches, which
    begin or end within a row."""
    if len(source.shape) < 2:
        return 0
    flat = raw.reshape(-1)
    return torn(flat, zero_stretches(flat), flat.size // len(raw))


def floats_of(tensor: PlannedTensor, first: int, last: int) -> Floats:
    """Rows of the source, float32 [last - first, in]; SourceError where one is not finite."""
    return _finite(tensor, np.ascontiguousarray(tensor.source.read(first, last)), first)


def _finite(tensor: PlannedTensor, raw: NDArray[np.uint8], first: int) -> Floats:
    """The same of rows that were read, from `first` on."""
    found = as_floats(tensor.source, raw, threads=1)
    if not np.isfinite(found).all():
        raise SourceError(_not_finite(tensor, raw, first))
    return found


def _compared(
    tensor: PlannedTensor, piece: Piece, raw: NDArray[np.uint8], made: NDArray[np.uint8]
) -> tuple[float, float]:
    """Sums of squared weights, and of what blocks that are made already lose."""
    size = lost = 0.0
    step = max(1, CACHED_WEIGHTS // tensor.source.in_features)
    for first in range(0, len(raw), step):
        weight = _finite(tensor, raw[first : first + step], piece.first + first)
        blocks = made[first : first + step]
        back = native_gguf.dequantize(blocks, tensor.type, weight.shape[1], threads=1)
        size += float(np.square(weight, dtype=np.float64).sum())
        lost += float(np.square(weight - back, dtype=np.float64).sum())
    return size, lost


def cached_weights(tensors: Sequence[PlannedTensor]) -> int:
    """How many weights at a time, in whole rows, are encoded and their squares summed."""
    return max([CACHED_WEIGHTS, *(tensor.source.in_features for tensor in tensors)])


def check_sums(
    tensor: PlannedTensor, piece: Piece, raw: NDArray[np.uint8], size: float, lost: float
) -> None:
    """SourceError, FormatError where the sums of squares say that a piece, `raw`, is no good."""
    if not isfinite(size):
        raise SourceError(_not_finite(tensor, raw, piece.first))
    if not isfinite(lost):
        raise _too_large(tensor, f"rows {piece.first} to {piece.last - 1}")


def check_fits(tensor: PlannedTensor, first: int, back: Floats) -> None:
    """FormatError where blocks of rows from `first` on stand for what is not finite."""
    good = np.isfinite(back).all(axis=-1)
    if not good.all():
        raise _too_large(tensor, f"row {first + int(np.argmin(good))}")


def _too_large(tensor: PlannedTensor, where: str) -> FormatError:
    return FormatError(
        f"{tensor.name}: weights in {where} are too large for "
        f"{tensor.type.name}; give the tensor another type with an override"
    )


def _most(tensor: PlannedTensor, type_: BlockType) -> int:
    """Bytes of the largest piece of a tensor, stored as this type."""
    rows = min(_step(tensor), tensor.source.rows)
    return rows * type_.row_bytes(tensor.source.in_features)


def _rows(buffer: NDArray[np.uint8], rows: int, row_bytes: int) -> NDArray[np.uint8]:
    return buffer[: rows * row_bytes].reshape(rows, row_bytes)


def _not_finite(tensor: PlannedTensor, raw: NDArray[np.uint8], first: int) -> str:
    """The sentence on the first row with a weight that is not finite."""
    source = tensor.source
    scratch = np.empty(2 * source.in_features, np.float32)

    def good(row: NDArray[np.uint8]) -> bool:
        size, _ = native_gguf.convert(
            row, source.type, None, source.in_features, None, None, scratch
        )
        return isfinite(size)

    row = next(number for number in range(len(raw)) if not good(raw[number : number + 1]))
    origin = f" (from {', '.join(source.origin)})" if source.origin else ""
    return (
        f"{tensor.name}{origin}: row {first + row} has a weight that is not finite; the source is "
        "damaged, and nothing good can be made of it"
    )
