"""Pieces of a GGUF file encoded on a GPU, a batch of them at a time, to the CPU's bytes.

    rows -> pinned memory -> the GPU: (float32) -> blocks -> float32 again -> what was lost
                             blocks and sums -> pinned memory -> the file

A thread takes a batch through all of it; while one waits for the GPU, others read and write. At
most PLACES batches are on their way: memory depends neither on the model nor on the threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.cuda import float_tasks
from qtool.cuda.encode_tasks import encode, needs_lattice, needs_means, squares
from qtool.cuda.lent import Lent
from qtool.cuda.staging import Place, Places
from qtool.formats.gguf_writer import GgufWriter
from qtool.gguf.pieces import (
    Done,
    Encoder,
    Given,
    Piece,
    Pieces,
    cached_weights,
    check_sums,
    hole_in,
    matrices_of,
)
from qtool.gguf.planned import PlannedTensor
from qtool.gguf_types import BY_NAME, FLOATS, BlockType
from qtool.native.sums import checksum
from qtool.streaming.in_order import Steps, in_order

BATCH_WEIGHTS = 1 << 23
PLACES = 4
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Batch:
    """Pieces of one tensor, one after the other."""

    pieces: range
    on_device: bool


def batches(
    tensors: Sequence[PlannedTensor],
    pieces: Pieces,
    numbers: Sequence[int],
    given: Given = Given(),
) -> list[Batch]:
    """All of these pieces, in their order; one by one those that no GPU encodes, or that are made
    already."""
    found: list[Batch] = []
    tensor, weights = -1, 0
    for number in numbers:
        piece = pieces[number]
        size = (piece.last - piece.first) * tensors[piece.tensor].source.in_features
        follows = piece.tensor == tensor and found[-1].pieces.stop == number
        if follows and found[-1].on_device and weights + size <= BATCH_WEIGHTS:
            found[-1] = Batch(range(found[-1].pieces.start, number + 1), True)
            weights += size
            continue
        planned = tensors[piece.tensor]
        made = given.rows(planned, piece.first, piece.first) is not None
        found.append(Batch(range(number, number + 1), encodes(planned) and not made))
        tensor, weights = piece.tensor, size
    return found


def encodes(tensor: PlannedTensor) -> bool:
    """Whether a GPU encodes a tensor."""
    source = tensor.source.type
    known = source in FLOATS or source.name in BY_NAME
    return not tensor.copied and known and tensor.type.name in BY_NAME


@dataclass(frozen=True)
class File:
    """A file under way, and what its tensors are encoded with."""

    tensors: Sequence[PlannedTensor]
    pieces: Pieces
    given: Given
    writer: GgufWriter
    done: Done

    @cached_property
    def run_weights(self) -> int:
        """Weights whose squares are summed by themselves, as the CPU does it."""
        return cached_weights(self.tensors)

    def rows(self, batch: Batch) -> tuple[PlannedTensor, list[Piece]]:
        made = [self.pieces[number] for number in batch.pieces]
        return self.tensors[made[0].tensor], made

    def edges(self, batch: Batch) -> list[list[int]]:
        """The runs of rows whose squares are summed by themselves, of each piece, from its batch's
        first row on; the CPU sums the same."""
        tensor, made = self.rows(batch)
        step, first = self.run_weights // tensor.source.in_features, made[0].first
        return [
            [*range(piece.first - first, piece.last - first, step), piece.last - first]
            for piece in made
        ]


class _Room:
    """The most bytes of each buffer that any batch needs."""

    def __init__(self, file: File, all_: Sequence[Batch]) -> None:
        self.raw = self.blocks = self.values = self.back = self.edges = self.sums = 0
        self.factors = self.means = 16
        for batch in all_:
            if not batch.on_device:
                continue
            tensor, made = file.rows(batch)
            source, rows = tensor.source, made[-1].last - made[0].first
            floats = 4 * rows * source.in_features
            runs = sum(len(piece) - 1 for piece in file.edges(batch))
            self.raw = max(self.raw, rows * source.type.row_bytes(source.in_features))
            self.blocks = max(self.blocks, rows * tensor.type.row_bytes(source.in_features))
            self.values = max(self.values, 0 if source.type in FLOATS else floats)
            self.back = max(self.back, floats)
            self.edges, self.sums = max(self.edges, 4 * (runs + 1)), max(self.sums, 16 * runs)
            if tensor.importance:
                matrices = matrices_of(tensor)[0]
                self.factors = max(self.factors, 4 * source.in_features * matrices)
                self.means = max(self.means, 4 * rows)


class DeviceEncoder:
    """One place's buffers, and the way of a batch through them."""

    def __init__(self, file: File, room: _Room, place: Place) -> None:
        self._file, self._place = file, place
        self._factors_of = -1
        self._lattices: dict[str, tuple[Any, Any]] = {}
        self._raw, self._blocks = place.host(room.raw), place.host(room.blocks)
        self._edges, self._sums = place.host(room.edges), place.host(room.sums)
        self._factors = place.host(room.factors)
        self._there = {name: place.room(max(nbytes, 16)) for name, nbytes in vars(room).items()}

    def __call__(self, batch: Batch) -> None:
        """Reads, encodes and writes; SourceError, FormatError name the tensor."""
        tensor, made = self._file.rows(batch)
        raw = self._read(tensor, made)
        edges = self._file.edges(batch)
        blocks, sums = self._on_device(tensor, made, raw, edges)
        first, run = made[0].first, 0
        writer, done = self._file.writer, self._file.done
        for number, piece, own in zip(batch.pieces, made, edges, strict=True):
            rows = slice(piece.first - first, piece.last - first)
            size = lost = 0.0
            for one, other in sums[run : run + len(own) - 1].tolist():  # in order, as the CPU does
                size, lost = size + one, lost + other
            run += len(own) - 1
            check_sums(tensor, piece, raw[rows], size, lost)
            writer.rows(piece.tensor, piece.first, blocks[rows])
            done.read[number], done.written[number] = checksum(raw[rows]), checksum(blocks[rows])
            done.size[number], done.lost[number] = size, lost
            done.holes[number] = hole_in(tensor.source, raw[rows])

    def _read(self, tensor: PlannedTensor, made: Sequence[Piece]) -> NDArray[np.uint8]:
        """Rows of the source, in memory that the device reads."""
        source, first = tensor.source, made[0].first
        row_bytes = source.type.row_bytes(source.in_features)
        rows = made[-1].last - first
        raw = self._raw.array[: rows * row_bytes].reshape(rows, row_bytes)
        for piece in made:
            part = raw[piece.first - first : piece.last - first]
            if source.fill is None:
                part[:] = source.read(piece.first, piece.last)
            elif (found := source.fill(piece.first, piece.last, part)) is not part:
                part[:] = found
        return raw

    def _on_device(
        self,
        tensor: PlannedTensor,
        made: Sequence[Piece],
        raw: NDArray[np.uint8],
        edges: Sequence[Sequence[int]],
    ) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
        """Blocks, and the two sums of squares of each run."""
        place, there, source = self._place, self._there, tensor.source
        rows, cols, row_bytes = (
            len(raw),
            source.in_features,
            tensor.type.row_bytes(source.in_features),
        )
        starts = [0, *(edge for piece in edges for edge in piece[1:])]
        self._edges.array[: 4 * len(starts)] = np.array(starts, np.int32).view(np.uint8)
        place.put(there["raw"], self._raw, raw.nbytes)
        place.put(there["edges"], self._edges, 4 * len(starts))

        tasks = []
        if source.type in FLOATS:
            weight = place.view(there["raw"], _DTYPES[source.type.name], (rows, cols))
        else:
            weight = place.view(there["values"], "float32", (rows, cols))
            stored = place.view(there["raw"], "uint8", raw.shape)
            tasks.append(float_tasks.gguf(stored, source.type, cols, out=weight))
        factors = self._importance(tensor, made[0].tensor)
        means = None
        if needs_means(tensor.type, factors):
            means = place.view(there["means"], "float32", (rows,))
        blocks = place.view(there["blocks"], "uint8", (rows, row_bytes))
        back = place.view(there["back"], "float32", (rows, cols))
        sums = place.view(there["sums"], "float64", (len(starts) - 1, 2))
        tasks += encode(
            weight,
            tensor.type,
            out=blocks,
            importance=factors,
            means=means,
            lattice=self._lattice(tensor.type),
            first_row=made[0].first,
            matrix_rows=matrices_of(tensor)[1],
        )
        tasks.append(float_tasks.gguf(blocks, tensor.type, cols, out=back))
        at = place.view(there["edges"], "int32", (len(starts),))
        tasks.append(squares(weight, back, at, out=sums))
        place.launch(*tasks)
        place.get(self._blocks, there["blocks"], rows * row_bytes)
        place.get(self._sums, there["sums"], 16 * (len(starts) - 1))
        place.finish()
        found = self._sums.array[: 16 * (len(starts) - 1)].view(np.float64)
        return (
            self._blocks.array[: rows * row_bytes].reshape(rows, row_bytes),
            found.reshape(-1, 2),
        )

    def _importance(self, tensor: PlannedTensor, number: int) -> Any:
        """[matrices, in] on the device, or None."""
        factors = self._file.given.importance(tensor)
        if factors is None:
            return None
        if self._factors_of != number:
            self._factors.array[: factors.nbytes] = factors.reshape(-1).view(np.uint8)
            self._place.put(self._there["factors"], self._factors, factors.nbytes)
            self._factors_of = number
        return self._place.view(self._there["factors"], "float32", factors.shape)

    def _lattice(self, block: BlockType) -> tuple[Any, Any] | None:
        """What is near to what on the lattice of a type, on the device."""
        if not needs_lattice(block):
            return None
        if block.name not in self._lattices:
            found = []
            for array in native_gguf.lattice(block):
                host, room = self._place.host(array.nbytes), self._place.room(array.nbytes)
                host.array[:] = array.view(np.uint8)
                self._place.put(room, host, array.nbytes)
                self._place.finish()
                found.append(self._place.view(room, str(array.dtype), array.shape))
            self._lattices[block.name] = found[0], found[1]
        return self._lattices[block.name]


class OnDevice:
    """The places of a run, lent to its threads."""

    def __init__(self, file: File, all_: Sequence[Batch], places: Places) -> None:
        room = _Room(file, all_)
        self._lent = Lent(lambda: DeviceEncoder(file, room, places()), PLACES)

    def __call__(self, batch: Batch) -> None:
        """Encodes a batch; waits where all places are in use."""
        with self._lent.one() as encoder:
            encoder(batch)


def encode_all(
    file: File,
    numbers: Sequence[int],
    places: Places,
    threads: int,
    commits: Callable[[int], None],
    steps: Steps,
) -> None:
    """These pieces, in their order; `commits` is told of each that is written."""
    all_ = batches(file.tensors, file.pieces, numbers, file.given)
    device = OnDevice(file, all_, places)

    def worker() -> Callable[[int], None]:
        encoder = Encoder(file.tensors, file.pieces, file.given, file.writer, file.done)

        def encode(place: int) -> None:
            batch = all_[place]
            if batch.on_device:
                device(batch)
            else:
                encoder(batch.pieces.start)
            for number in batch.pieces:
                commits(number)

        return encode

    in_order(len(all_), max(threads, 2), worker, steps)  # one waits for the GPU, one reads
