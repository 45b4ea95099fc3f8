"""What is added up of a GGUF file beside its source.

A piece of a few hundred thousand weights is in memory at a time, dequantized. The pieces are those
that `quantize` works in, so that the checksum of the source which it stores can be made again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.checkpoints.holes import torn, zero_stretches
from qtool.gguf.pieces import CACHED_WEIGHTS, Pieces
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf.to_hf.hf_tensor import floats_of
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.gguf_types import BY_NAME, FLOATS, BlockType
from qtool.native.sums import checksum
from qtool.streaming.in_order import in_order
from qtool.verification.against.likeness import others
from qtool.verification.against.side_by_side import sums_of_products
from qtool.verification.gguf.blanks import Blank, blanks
from qtool.verification.gguf.signs import Negative, negative
from qtool.verification.gguf.single_blocks import OffBlock, off_blocks
from qtool.verification.gguf.typical import TYPICAL

# Blocks of 32 that begin with their scale, a float16: what they explain is known exactly.
SCALED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
LOST = 0.95  # relative: as far off as zeros
PART, _UNLIKE = 1024, 3.0  # weights of a row; times the typical error
_LEAST = 1e-6  # of the mean square: parts that are about 0 in the source tell nothing
_Block = TypeVar("_Block", OffBlock, Blank, Negative)


@dataclass
class Sums:
    """What is added up over a tensor's pieces, by piece."""

    size: NDArray[np.float64]  # of the squared weights
    lost: NDArray[np.float64]  # of the squared differences from the source
    whole: NDArray[np.float64]  # of the source's squared weights
    steps: NDArray[np.float64]  # of scale^2 / 12 over the weights, where blocks tell the scale
    holes: NDArray[np.int64]  # bytes of 0 in stretches that begin or end within a row
    torn: NDArray[np.int64]  # parts of rows that have nothing in common with the source
    others: NDArray[np.int64]  # numbers that are not the source's, where both are floats
    digests: NDArray[np.uint64]  # of the source's bytes
    pieces: Pieces
    tensors: Sequence[SourceTensor]
    off: dict[int, list[OffBlock]] = field(default_factory=dict)  # of pieces, rows of their tensor
    blanks: dict[int, list[Blank]] = field(default_factory=dict)  # likewise
    negative: dict[int, list[Negative]] = field(default_factory=dict)  # likewise
    sources: dict[str, SourceTensor] = field(default_factory=dict)

    def of(self, sums: NDArray[np.float64], number: int) -> float:
        """The total of one tensor."""
        return float(sums[self.pieces.of(number)].sum())

    def off_of(self, number: int) -> list[OffBlock]:
        """The blocks of one tensor whose scale is off."""
        return self._blocks(self.off, number)

    def blanks_of(self, number: int) -> list[Blank]:
        """The blocks of one tensor with bytes that were lost."""
        return self._blocks(self.blanks, number)

    def negative_of(self, number: int) -> list[Negative]:
        """Those of one tensor's blocks with a scale below 0 that should not be, piece by piece."""
        return self._blocks(self.negative, number)

    def single_of(self, number: int) -> list[OffBlock | Blank]:
        """Both."""
        return [*self.off_of(number), *self.blanks_of(number)]

    def _blocks(self, found: dict[int, list[_Block]], number: int) -> list[_Block]:
        pieces = range(*self.pieces.of(number).indices(len(self.pieces)))
        return [block for piece in pieces for block in found.get(piece, ())]

    def relative(self, number: int, besides: float = 0.0) -> float:
        """How far a tensor is from its source. besides: squared, what does not count."""
        whole, lost = self.of(self.whole, number), self.of(self.lost, number) - besides
        if not lost > 0:
            return 0.0
        return math.sqrt(lost / whole) if whole else math.inf

    def expected(self, number: int) -> float:
        """The relative error that a tensor's own scales explain, or that its type usually makes."""
        steps, whole = self.of(self.steps, number), self.of(self.whole, number)
        if steps and whole:
            return math.sqrt(steps / whole)
        return TYPICAL.get(self.tensors[number].type_in_file.name, 0.0)


def add_up(
    file: GgufSource,
    source: GgufSource | None,
    threads: int,
    steps: Callable[[int], Iterable[int]],
) -> Sums:
    """Read every tensor once, and the source's of the same name and shape beside it."""
    tensors = [t for t in file.tensors if t.type in FLOATS or t.type.name in BY_NAME]
    planned = [PlannedTensor(t, t.type, None, False, False, False) for t in tensors]
    pieces = Pieces(planned)
    count = len(pieces)
    sources = {t.name: t for t in (source.tensors if source is not None else ())}
    shared = {
        t.name: sources[t.name]
        for t in tensors
        if t.name in sources and stored_shape(sources[t.name].shape) == stored_shape(t.shape)
    }
    found = Sums(
        np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count),
        np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64),
        np.zeros(count, np.uint64),
        pieces, tensors, sources=shared,
    )  # fmt: skip
    widest = max((t.in_features for t in tensors), default=0)
    by_importance = any(key.startswith("quantize.imatrix.") for key in file.metadata)

    def worker() -> Callable[[int], None]:
        scratch = np.empty(2 * max(CACHED_WEIGHTS, widest), np.float32)

        def work(number: int) -> None:
            piece = pieces[number]
            tensor = tensors[piece.tensor]
            raw = np.ascontiguousarray(tensor.read(piece.first, piece.last))
            size, _ = native_gguf.convert(
                raw, tensor.type, None, tensor.in_features, None, None, scratch
            )
            found.size[number] = size
            rows = piece.last - piece.first
            if len(tensor.shape) > 1:
                flat = raw.view(np.uint8).reshape(-1)
                found.holes[number] = torn(flat, zero_stretches(flat), flat.size // rows)
            if tensor.type is tensor.type_in_file:  # else raw is multiplied already
                below = negative(raw, tensor.type, tensor.in_features)
                if below is not None:
                    found.negative[number] = [below.below(piece.first)]
            other = shared.get(tensor.name)
            if other is not None:
                there = np.ascontiguousarray(other.read(piece.first, piece.last))
                found.digests[number] = checksum(there)
                if there.shape == raw.shape and np.array_equal(there, raw):
                    found.whole[number] = size
                    return
                old = floats_of(other, piece.first, piece.last)
                new = floats_of(tensor, piece.first, piece.last)
                with np.errstate(all="ignore"):  # what is not finite is told of elsewhere
                    whole, lost = (sums_of_products(m, m, (PART,))[0] for m in (old, old - new))
                    found.whole[number], found.lost[number] = whole.sum(), lost.sum()
                    found.steps[number] = _steps(raw, tensor.type)
                    if {tensor.type_in_file, other.type_in_file} <= {*FLOATS}:
                        kinds = tensor.type.name, other.type.name
                        found.others[number] = others(new, old, kinds).sum()
                    else:
                        kind = tensor.type_in_file.name
                        found.torn[number] = _torn(whole, lost, kind, old.size)
                        usual = TYPICAL.get(kind, 0.0)
                        lost_ones = []
                        if tensor.type is tensor.type_in_file:  # likewise
                            lost_ones = blanks(raw, new, old, kind, usual)
                        if lost_ones:
                            found.blanks[number] = [one.below(piece.first) for one in lost_ones]
                        off = off_blocks(new, old, kind, usual, by_importance)
                        off = [o for o in off if not any(one.has(o) for one in lost_ones)]
                        if off:
                            found.off[number] = [one.below(piece.first) for one in off]

        return work

    in_order(count, threads, worker, steps)
    return found


def _torn(whole: NDArray[np.float64], lost: NDArray[np.float64], kind: str, weights: int) -> int:
    """Parts of rows that are as far off as zeros, and farther than the type makes any. whole, lost:
    the sums of squares of the source, and of what differs, of each; weights: in all of them."""
    far = max(LOST, _UNLIKE * TYPICAL.get(kind, 0.0)) ** 2
    least = _LEAST * whole.sum() / weights * PART
    return int((lost > far * np.maximum(whole, least)).sum())


def _steps(raw: NDArray[np.uint8], block: BlockType) -> float:
    if block.name not in SCALED:
        return 0.0
    scales = raw.reshape(-1, block.nbytes)[:, :2].copy().view(np.float16).astype(np.float64)
    return float(np.square(scales).sum()) * block.weights / 12
