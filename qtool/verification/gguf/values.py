"""The numbers of a GGUF file: finite, and near those of the source.

A piece of a few hundred thousand weights is in memory at a time, dequantized: a block with a scale
that is NaN or infinite shows as weights that are. The pieces are those that `quantize` works in, so
that the checksum of the source which it stores can be made again.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.gguf.kinds import stored_shape
from qtool.gguf.pieces import CACHED_WEIGHTS, Pieces
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf.to_hf.hf_tensor import floats_of
from qtool.gguf.workers import in_order
from qtool.gguf_types import BY_NAME, FLOATS, BlockType
from qtool.native.sums import checksum
from qtool.verification.against import made_up
from qtool.verification.against.likeness import others
from qtool.verification.against.scaling import UNEXPLAINED, WRONG
from qtool.verification.against.side_by_side import sums_of_products
from qtool.verification.finding import Finding, LayerError
from qtool.verification.gguf import single_blocks
from qtool.verification.gguf.single_blocks import OffBlock, off_blocks
from qtool.verification.holes import torn, zero_stretches
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some, verb

# The relative error that each type makes of normal numbers, without importance: measured with our
# encoders over 64 rows of 4096.
TYPICAL = {
    "Q4_0": 0.086, "Q4_1": 0.078, "Q5_0": 0.043, "Q5_1": 0.038, "Q8_0": 0.005, "Q2_K": 0.297,
    "Q3_K": 0.151, "Q4_K": 0.071, "Q5_K": 0.036, "Q6_K": 0.018, "IQ2_XXS": 0.344, "IQ2_XS": 0.300,
    "IQ3_XXS": 0.214, "IQ1_S": 0.486, "IQ4_NL": 0.076, "IQ3_S": 0.166, "IQ2_S": 0.265,
    "IQ4_XS": 0.077, "IQ1_M": 0.583, "TQ1_0": 0.808, "TQ2_0": 0.808, "MXFP4": 0.115,
    "NVFP4": 0.095, "Q1_0": 0.600, "Q2_0": 0.719, "F16": 0.0003, "BF16": 0.0017,
}  # fmt: skip
# Blocks of 32 that begin with their scale, a float16: what they explain is known exactly.
_SCALED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
_FAR, _WRONG = (
    2.5,
    4.0,
)  # times the typical error; other numbers than normal ones make up to 2 of it
_LOST = 0.95  # relative: as far off as zeros
_PART, _UNLIKE = 1024, 3.0  # weights of a row; times the typical error
_LEAST = 1e-6  # of the mean square: parts that are about 0 in the source tell nothing
# In lattices of 3 bits and fewer GPTQ leaves single parts that are as far off
# (3 of SmolLM2 in IQ1_S, 1 in IQ3_XXS); a page of a file that is damaged has a dozen.
_COARSE, _FEWEST = 0.16, 6  # typical error; parts
_SHARES = 0.002, 0.01  # of all parts: GPTQ leaves more of a larger matrix; fine types, coarse ones
_OTHER = "; was it made of another model, or of one that was quantized before?"
_NORMS = (
    ", and norms among them: it was made of another model, or of an artifact into which AWQ or "
    "smoothing had folded scales; verify that one instead"
)
_ROUNDING = 2.0**-8  # the least that counts as an error: bfloat16 on the way makes half of it


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
    sources: dict[str, SourceTensor] = field(default_factory=dict)

    def of(self, sums: NDArray[np.float64], number: int) -> float:
        """The total of one tensor."""
        return float(sums[self.pieces.of(number)].sum())

    def off_of(self, number: int) -> list[OffBlock]:
        """The blocks of one tensor whose scale is off."""
        pieces = range(*self.pieces.of(number).indices(len(self.pieces)))
        return [block for piece in pieces for block in self.off.get(piece, ())]


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
                    whole, lost = (sums_of_products(m, m, (_PART,))[0] for m in (old, old - new))
                    found.whole[number], found.lost[number] = whole.sum(), lost.sum()
                    found.steps[number] = _steps(raw, tensor.type)
                    if {tensor.type_in_file, other.type_in_file} <= {*FLOATS}:
                        kinds = tensor.type.name, other.type.name
                        found.others[number] = others(new, old, kinds).sum()
                    else:
                        kind = tensor.type_in_file.name
                        found.torn[number] = _torn(whole, lost, kind, old.size)
                        off = off_blocks(new, old, kind, TYPICAL.get(kind, 0.0), by_importance)
                        if off:
                            found.off[number] = [one.below(piece.first) for one in off]

        return work

    in_order(count, threads, worker, steps)
    return found


def _torn(whole: NDArray[np.float64], lost: NDArray[np.float64], kind: str, weights: int) -> int:
    """Parts of rows that are as far off as zeros, and farther than the type makes any. whole, lost:
    the sums of squares of the source, and of what differs, of each; weights: in all of them."""
    far = max(_LOST, _UNLIKE * TYPICAL.get(kind, 0.0)) ** 2
    least = _LEAST * whole.sum() / weights * _PART
    return int((lost > far * np.maximum(whole, least)).sum())


def _steps(raw: NDArray[np.uint8], block: BlockType) -> float:
    if block.name not in _SCALED:
        return 0.0
    scales = raw.reshape(-1, block.nbytes)[:, :2].copy().view(np.float16).astype(np.float64)
    return float(np.square(scales).sum()) * block.weights / 12


def _expected(sums: Sums, number: int) -> float:
    """The relative error that the tensor's own scales explain, or that its type usually makes."""
    steps, whole = sums.of(sums.steps, number), sums.of(sums.whole, number)
    if steps and whole:
        return math.sqrt(steps / whole)
    return TYPICAL.get(sums.tensors[number].type_in_file.name, 0.0)


def check_values(sums: Sums) -> Iterator[Finding]:
    """values: every weight that comes out is finite."""
    for number, tensor in enumerate(sums.tensors):
        total = sums.of(sums.size, number)
        if not math.isfinite(total):
            first = next(
                n for n in range(*sums.pieces.of(number).indices(len(sums.pieces)))
                if not math.isfinite(sums.size[n])
            )  # fmt: skip
            piece = sums.pieces[first]
            weights = floats_of(tensor, piece.first, piece.last)
            row, column = divmod(int((~np.isfinite(weights)).argmax()), tensor.in_features)
            where = f"column {column}"
            if len(tensor.shape) > 1:
                where = f"row {piece.first + row}, {where}"
            yield Finding(
                "error", "values", tensor.name,
                f"{tensor.name} ({tensor.type_in_file.name}) has weights that are NaN or infinite, "
                f"the first in {where}; fetch or make the file again",
            )  # fmt: skip
        elif total and (hole := int(sums.holes[sums.pieces.of(number)].sum())):
            yield Finding(
                "error", "values", tensor.name,
                f"{tensor.name}: {hole:,} bytes are 0 in long stretches that begin or end within a "
                "row: it was not written or fetched to its end; fetch or make the file again",
            )  # fmt: skip
        elif total == 0 and len(stored_shape(tensor.shape)) > 1:
            yield Finding(
                "warning", "values", tensor.name,
                f"{tensor.name}: every weight is 0; the layer does nothing, unless the model has "
                "it so",
            )  # fmt: skip


def layer_errors(sums: Sums) -> list[LayerError]:
    """One line for every tensor that is stored in another type than the source's."""
    found = []
    for number, tensor in enumerate(sums.tensors):
        other = sums.sources.get(tensor.name)
        if other is None or other.type_in_file == tensor.type_in_file:
            continue
        found.append(
            LayerError(
                tensor.name,
                tensor.type_in_file.name,
                _relative(sums, number),
                _expected(sums, number) or None,
            )
        )
    return found


def _relative(sums: Sums, number: int, besides: float = 0.0) -> float:
    """besides: squared, what does not count."""
    whole, lost = sums.of(sums.whole, number), sums.of(sums.lost, number) - besides
    if not lost > 0:
        return 0.0
    return math.sqrt(lost / whole) if whole else math.inf


def check_errors(sums: Sums, moved: bool) -> Iterator[Finding]:
    """layer-error: no tensor is farther from its source than its type explains. moved: matrices
    make up for what was lost before them."""
    far: dict[str, tuple[float, float, bool]] = {}
    for number, tensor in enumerate(sums.tensors):
        if tensor.name not in sums.sources:
            continue
        # Blocks whose scale is off are told by themselves.
        error = _relative(sums, number, sum(one.lost for one in sums.off_of(number)))
        same = sums.sources[tensor.name].type_in_file == tensor.type_in_file
        typical = 0.0 if same else _expected(sums, number)
        known = tensor.type.name in _SCALED
        if not error > max((UNEXPLAINED if known else _FAR) * typical, _ROUNDING):
            continue
        times = WRONG if known else _WRONG
        wrong = error > max(times * typical, _ROUNDING) or error > max(_LOST, 1.5 * typical)
        far[tensor.name] = (error, typical, wrong)
    if moved:
        near = {name: one[0] for name, one in far.items() if one[0] <= made_up.FARTHEST}
        yield from made_up.told("layer-error", list(near.items()))
        far = {name: one for name, one in far.items() if name not in near}
    wrong = any(one[2] for one in far.values())
    yield from _unlike(sums, far if wrong else ())
    if far:
        name = max(far, key=lambda n: far[n][0])
        error, typical, _ = far[name]
        norms = any(one.endswith("norm.weight") for one in far)
        yield Finding(
            "error" if wrong else "warning", "layer-error", name,
            f"{counted(len(far), 'tensor')} farther from the source than their types explain: "
            f"{name} is off by {error:.1%}, {typical:.1%} is explained"
            + (f"; also {some([n for n in far if n != name])}" if len(far) > 1 else "")
            + (_NORMS if norms else _OTHER),
        )  # fmt: skip


def _unlike(sums: Sums, told: Collection[str]) -> Iterator[Finding]:
    """Tensors near enough as a whole, of which parts are not the source's."""
    torn: dict[str, str] = {}
    off: dict[str, list[OffBlock]] = {}
    for number, tensor in enumerate(sums.tensors):
        if tensor.name not in sums.sources or tensor.name in told:
            continue
        pieces = sums.pieces.of(number)
        blocks = sums.off_of(number)
        parts, others = int(sums.torn[pieces].sum()), int(sums.others[pieces].sum())
        size = tensor.rows * tensor.in_features
        coarse = TYPICAL.get(tensor.type_in_file.name, 0.0) > _COARSE
        every = tensor.rows * -(-tensor.in_features // _PART)
        if blocks:
            off[tensor.name] = blocks
            parts -= len({(one.row, one.columns.start // _PART) for one in blocks})
        if parts >= max(_FEWEST if coarse else 1, _SHARES[coarse] * every):
            torn[tensor.name] = f"{counted(parts, 'part')} of its rows"
        elif 0 < others < size / 2:
            torn[tensor.name] = f"{others:,} of {size:,} numbers"
    yield from single_blocks.told("layer-error", off)
    if torn:
        name, what = next(iter(torn.items()))
        yield Finding(
            "error", "layer-error", name,
            f"{counted(len(torn), 'tensor')} with parts that are not the source's: {name} ({what})"
            + (f"; also {some([*torn][1:])}" if len(torn) > 1 else "")
            + "; it is damaged: fetch or make the file again",
        )  # fmt: skip


def check_against(file: GgufSource, source: GgufSource) -> Iterator[Finding]:
    """against: the tensors of the source, no less, no more, of the same shapes."""
    there = {tensor.name: tensor for tensor in file.tensors}
    wanted = {tensor.name: tensor for tensor in source.tensors}
    lost = [n for n in wanted if n not in there and n != "output.weight"]
    if lost:
        yield Finding(
            "error", "against", lost[0],
            f"{counted(len(lost), 'tensor')} of the source "
            f"{verb(len(lost), 'are', 'is')} not in the file: {some(lost)}",
        )  # fmt: skip
    extra = [n for n in there if n not in wanted and not n.startswith(("output.", "rope_f"))]
    if extra:
        yield Finding(
            "warning", "against", extra[0],
            f"{counted(len(extra), 'tensor')} not in the source: {some(extra)}",
        )  # fmt: skip
    for name, tensor in there.items():
        if name in wanted and stored_shape(wanted[name].shape) != stored_shape(tensor.shape):
            yield Finding(
                "error", "against", name,
                f"{name} is {list(tensor.shape)}, in the source {list(wanted[name].shape)}; they "
                "are different models",
            )  # fmt: skip
    if source.architecture != file.architecture:
        yield Finding(
            "error", "against", "general.architecture",
            f"the architecture is {file.architecture}, the source's {source.architecture}",
        )  # fmt: skip


def source_digest(sums: Sums) -> str | None:
    """The checksum of the source as `quantize` stores it; None where not all of it was read."""
    if any(tensor.name not in sums.sources for tensor in sums.tensors):
        return None
    parts: list[bytes] = []
    for number, tensor in enumerate(sums.tensors):
        shape = ",".join(map(str, stored_shape(tensor.shape)))
        kind = sums.sources[tensor.name].type.name
        parts.append(f"{tensor.name}\0{kind}\0{shape}\0".encode())
        parts.append(sums.digests[sums.pieces.of(number)].astype("<u8").tobytes())
    return f"{checksum(np.frombuffer(b''.join(parts), np.uint8)):016x}"
