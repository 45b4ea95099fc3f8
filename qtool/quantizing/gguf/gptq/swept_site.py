"""GPTQ into GGUF: the matrices that read one input, of a block or of the head, some rows at a time.

    Gram matrix of the input -> its factor -> for some rows of a matrix: blocks (sweep)
                -> the block's file in the workspace
                -> dequantized, into the decoder block: later ones are fed by these

With a device, it factors and sweeps; threads read, encode and write meanwhile, and choose the
points of IQ1 to IQ3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import methods, native_gguf
from qtool.blockwise.output_errors import signal_and_noise
from qtool.blockwise.row_feedback import FED_BACK, Rows
from qtool.blockwise.row_rounding import RowFactor, factored, round_rows
from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats, gram_on, is_rare
from qtool.cuda.device import Device
from qtool.gguf.gptq.levels import together
from qtool.gguf.importance.measured import Squares
from qtool.gguf.pieces import check_fits, matrices_of
from qtool.gguf.planned import PlannedTensor
from qtool.methods import gptq
from qtool.native.sums import checksum
from qtool.planning.duration import REPORTED_ROWS
from qtool.planning.gguf.estimate import SWEPT_AT_ONCE as AT_ONCE
from qtool.quantizing.gguf.gptq import sweep
from qtool.quantizing.gguf.gptq.in_block import growth_of, put_back, rows_before
from qtool.streaming.stream import LoadedBlock
from qtool.streaming.workers import Workers

Floats = NDArray[np.float32]
Blocks = NDArray[np.uint8]  # [out, bytes of a row]
Job = tuple[Site, Sequence["Part"], dict[str, SiteStats]]
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]  # map, side by side or not


@dataclass(frozen=True)
class Part:
    """One matrix of a tensor: all of it, or an expert's."""

    tensor: PlannedTensor
    matrix: int
    start: int  # byte of the block's file


@dataclass(frozen=True)
class Made:
    """What became of a part: checksums of its blocks, some rows at a time; of some rows, tr(W H W')
    and tr(E H E'); whether it was swept."""

    name: str
    matrix: int
    sums: list[int]
    signal: float
    noise: float
    swept: bool


@dataclass(frozen=True)
class _Known:
    """What is known of the input of matrices."""

    gram: torch.Tensor | None  # on the device, where there is one
    given: sweep.Given
    notes: tuple[str, ...] = ()
    swept: bool = True


def sweep_site(
    job: Job,
    options: gptq.Options,
    block: LoadedBlock,
    file: Path,
    workers: Workers,
    device: Device | None,
    each: Each = map,
    moved: bool = False,
    rows: Rows | None = None,
) -> tuple[list[Made], list[str]]:
    """The matrices that read one site, and notes. Takes its own of the stats, which are large.

    file: the block's. workers: who call this, and have threads for a large matrix when those of
    others are done. each: maps a function of some rows over all. moved: the block's matrices are
    others than the source's. rows: by which those of some matrices compensate for each other, used
    up.
    """
    site, parts, stats = job
    seen = stats.pop(site.id)
    square, rare = Squares.of(site, seen).square, is_rare(site, seen)
    with methods.named(_input_of(parts)):
        known = _known(square, parts, seen, rare, options, workers, device)
    fed: dict[tuple[str, int], Blocks] = {}  # by tensor and matrix
    for part in parts if known.swept else ():
        done = _fed_back(part, rows or {}, known, block, workers, device, moved)
        if done is not None:
            fed[part.tensor.name, part.matrix] = done
    made, notes = _sweep(parts, known, block, file, workers, device, each, moved, fed)
    return made, [*notes, *([FED_BACK] if fed else [])]


def sweep_head(
    part: Part,
    seen: SiteStats,
    options: gptq.Options,
    file: Path,
    workers: Workers,
    device: Device | None,
) -> tuple[Made, list[str]]:
    """The head, which no block after it is fed by, and notes. seen: its input's Gram matrix."""
    assert seen.gram is not None
    square = np.ascontiguousarray(np.diagonal(seen.gram))
    with methods.named(_input_of([part])):
        known = _known(square, [part], seen, False, options, workers, device)
    (made,), notes = _sweep([part], known, None, file, workers, device, workers.map, False, {})
    return made, notes


def _input_of(parts: Sequence[Part]) -> str:
    return f"the input of {parts[0].tensor.name}"


def _sweep(
    parts: Sequence[Part],
    known: "_Known",
    block: LoadedBlock | None,
    file: Path,
    workers: Workers,
    device: Device | None,
    each: Each,
    moved: bool,
    fed: Mapping[tuple[str, int], Blocks],
) -> tuple[list[Made], list[str]]:
    """Matrices that read one input, by what is known of it, and notes. moved: the block has all
    otherwise than the source; fed: what is rounded already."""
    step = partial(
        _step, block=block, known=known, workers=workers, device=device, file=file, moved=moved,
        fed=fed,
    )  # fmt: skip
    done = iter(each(step, [(part, *rows) for part in parts for rows in steps_of(part.tensor)]))
    made = []
    for part in parts:
        sums: list[int] = []
        signal = noise = 0.0
        for _ in steps_of(part.tensor):
            one, kept, lost = next(done)
            sums.append(one)
            signal, noise = signal + kept, noise + lost
        made.append(Made(part.tensor.name, part.matrix, sums, signal, noise, known.swept))
    return made, [f"{_input_of(parts)}: {note}" for note in known.notes]


def steps_of(tensor: PlannedTensor) -> list[tuple[int, int]]:
    """The rows of a matrix that are swept together."""
    rows, step = matrices_of(tensor)[1], max(1, AT_ONCE // tensor.source.in_features)
    return [(first, min(rows, first + step)) for first in range(0, rows, step)]


def _known(
    square: Floats,
    parts: Sequence[Part],
    seen: SiteStats,
    rare: bool,
    options: gptq.Options,
    workers: Workers,
    device: Device | None,
) -> _Known:
    """What the matrices that read an input are swept by. square: [in], its sums of squares; rare:
    too few tokens to go by."""
    if seen.gram is None or rare:
        gram = None if seen.gram is None else torch.from_numpy(seen.gram)
        weighed = sweep.unswept(square, seen.count)
        return _Known(gram, weighed, swept=False)
    unit = max(together(part.tensor.type) for part in parts)
    if device is None:
        spread = workers.spread
        factor = gptq.factor(seen.gram, options, seen.count, together=unit, spread=spread)
        return _Known(torch.from_numpy(seen.gram), sweep.swept(square, factor), factor.notes)
    from qtool.methods import gptq_device

    with device.alone, device.explained():
        gram = gram_on(device, seen)
        there = gptq_device.factor(gram, options, seen.count, together=unit)
    return _Known(gram, sweep.swept_on(device, square, there), there.notes)


def _step(
    rows: tuple[Part, int, int],
    block: LoadedBlock | None,
    known: _Known,
    workers: Workers,
    device: Device | None,
    file: Path,
    moved: bool,
    fed: Mapping[tuple[str, int], Blocks],
) -> tuple[int, float, float]:
    """Some rows of a matrix: into the file, and into the decoder block. The checksum of their
    blocks; of some of them, tr(W H W') and tr(E H E')."""
    part, first, last = rows
    tensor, width = part.tensor, part.tensor.source.in_features
    every = max(1, matrices_of(tensor)[1] // REPORTED_ROWS)
    start = part.matrix * matrices_of(tensor)[1] + first
    count = last - first
    weight = rows_before(block, tensor, start, count, moved)
    done = fed.get((tensor.name, part.matrix))
    if done is None:
        blocks = sweep.blocks_of(weight, tensor.type, known.given, workers.share())
    else:
        blocks = done[first:last]
    back = native_gguf.dequantize(blocks, tensor.type, width, threads=1)
    check_fits(tensor, start, back)
    with file.open("r+b") as out:
        out.seek(part.start + first * tensor.type.row_bytes(width))
        out.write(blocks.data)
    signal = noise = 0.0
    if known.gram is not None:
        kept = slice(-first % every, None, every)
        some = torch.from_numpy(weight[kept])
        lost = some - torch.from_numpy(back[kept])
        signal, noise = _errors(some, lost, known.gram, device)
    if block is not None:
        put_back(block, tensor, start, back)
    return checksum(blocks), signal, noise


def fed_names(parts: Mapping[str, Sequence[Part]]) -> set[str]:
    """The checkpoint's matrices whose rows may compensate for each other: those of which one tensor
    is made, and no other matrix is in it but those of other experts."""
    named = (_name_of(part) for some in parts.values() for part in some)
    return {name for name in named if name is not None}


def _name_of(part: Part) -> str | None:
    """The checkpoint's tensor that a part is, or has it in a stack; None where it has others, too,
    or some of its rows."""
    origin, count = part.tensor.source.origin, matrices_of(part.tensor)[0]
    cut = part.tensor.source.cut
    if cut is not None and (count == 1 or not cut.only_transposed):
        return None
    if len(origin) == count:
        return origin[part.matrix]
    return origin[0] if len(origin) == 1 else None


def _rows_of(part: Part, rows: Rows) -> Floats | RowFactor | None:
    """H of a part's rows, used up where no other has it, in its own order and for rows as it has
    them grown."""
    tensor = part.tensor
    source, count = tensor.source, matrices_of(tensor)[1]
    name = _name_of(part) or ""
    own = rows.get(name)
    if isinstance(own, RowFactor):
        plain = source.order is None and source.growth is None and len(own.order) == count
        return own if plain else None
    if own is None or len(own) != count:
        return None
    del rows[name]
    if source.order is not None:
        order = source.order(np.arange(count, dtype=np.int64))
        own = own[np.ix_(order, order)]
    growth = growth_of(tensor, 0, count)
    return own if growth is None else own / growth / growth.T


def _fed_back(
    part: Part,
    rows: Rows,
    known: _Known,
    block: LoadedBlock,
    workers: Workers,
    device: Device | None,
    moved: bool,
) -> Blocks | None:
    """A matrix whose rows compensate for each other, as `rows` says, used up; None of others."""
    own = _rows_of(part, rows)
    if own is None:
        return None
    type_, width = part.tensor.type, part.tensor.source.in_features
    count = matrices_of(part.tensor)[1]
    made = np.empty((count, type_.row_bytes(width)), np.uint8)

    def rounded(some: Floats, which: NDArray[np.int32]) -> Floats:
        made[which] = blocks = sweep.blocks_of(some, type_, known.given, workers.share())
        return native_gguf.dequantize(blocks, type_, width, threads=1)

    before = partial(rows_before, block, part.tensor, part.matrix * count, count, moved)
    if device is None:
        own = factored(own, workers.spread)
        round_rows(before(), own, rounded, workers.spread)
    else:
        with device.alone, device.explained():
            own = factored(own, device=device)
            round_rows(before(), own, rounded, device=device)
    return made


def _errors(
    kept: torch.Tensor, lost: torch.Tensor, gram: torch.Tensor, device: Device | None
) -> tuple[float, float]:
    if device is None:
        return signal_and_noise(kept, lost, gram)
    with device.alone, device.explained():
        return signal_and_noise(kept.to(gram.device), lost.to(gram.device), gram)
