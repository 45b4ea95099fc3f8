"""GPTQ into GGUF: codes chosen by the sweep, while the model is measured block by block.

    Gram matrix of an input -> its factor
    rows of a matrix -> blocks as llama.cpp's encoder makes them, with an importance between what an
                        error in each column costs before others make up for it and after
                     -> their levels (scales and minima stay) -> the sweep's codes, put into the
                        blocks -> the workspace, from where the file is written
                     -> dequantized, into the decoder block: later ones are fed by what the file has

Types on a lattice have no levels for single weights: those matrices are encoded as llama.cpp does,
later, and so are the embedding and the head. Experts that hardly a token reached are encoded so,
too, here.

(SmolLM2, 12 matrices: with the geometric mean of the two costs the output error of Q2_K to Q6_K,
Q4_0 and IQ4_XS is up to 2.4 % lower than with the cost after, and never higher than with either by
more than 0.1 %. Scales fitted again after the sweep, by least squares under H's diagonal, raise
it by 4 to 26 %: they undo what later columns made up for.)
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import methods, native, native_gguf
from qtool.calibrating.allocator import give_back
from qtool.calibrating.blockwise import groups_of, merged
from qtool.calibrating.sites import BlockSites, Site
from qtool.calibrating.stats import MIN_EXPERT_TOKENS, SiteStats, collect, is_rare
from qtool.calibrating.stream import LoadedBlock, Stream
from qtool.calibrating.workers import Workers
from qtool.gguf.importance import matrices_reading
from qtool.gguf.kinds import layer_of
from qtool.gguf.levels import levels, put_codes
from qtool.gguf.pieces import floats_of, matrices_of
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.recipe import GgufRecipe
from qtool.gguf.source import GgufSource
from qtool.gguf_types import BlockType
from qtool.methods import gptq
from qtool.native.sums import checksum

Floats = NDArray[np.float32]

_AT_ONCE = 1 << 23  # weights of a matrix that are swept together
_LEAST = np.float32(1e-6)  # of the mean square: what always is zero is stored, too
_REPORTED_ROWS = 256  # of each matrix, about, for its relative error


@dataclass(frozen=True)
class _Part:
    """One matrix of a tensor: all of it, or an expert's."""

    tensor: PlannedTensor
    matrix: int
    start: int  # byte of the block's file


@dataclass(frozen=True)
class _Swept:
    """What became of a part: its blocks' checksum; of some rows, tr(W H W') and tr(E H E')."""

    name: str
    matrix: int
    checksum: int
    signal: float
    noise: float
    notes: tuple[str, ...]


@dataclass
class Rounding:
    """The sweeps of a run, block by block."""

    options: gptq.Options
    folder: Path  # of the workspace
    gram_bytes: int
    tensors: Mapping[int, Sequence[PlannedTensor]]  # to be swept, by decoder block
    kept: list[Mapping[str, Any]] = field(default_factory=list)  # by block, as the journal has it
    _starts: dict[str, tuple[int, int]] = field(default_factory=dict)  # block and byte, by name

    @classmethod
    def of(
        cls,
        recipe: GgufRecipe,
        tensors: Sequence[PlannedTensor],
        folder: Path,
        gram_bytes: int,
    ) -> "Rounding":
        """Before the first block."""
        by_block: dict[int, list[PlannedTensor]] = defaultdict(list)
        for tensor in tensors:
            if tensor.swept:
                by_block[layer_of(tensor.name)].append(tensor)
        return cls(gptq.Options(**recipe.gptq.model_dump()), folder, gram_bytes, by_block)

    def take_names(self, source: GgufSource) -> None:
        """Tensors are made of those of the checkpoint that `source` says."""
        known = {tensor.name: tensor for tensor in source.tensors}
        self.tensors = {
            index: [replace(tensor, source=known[tensor.name]) for tensor in tensors]
            for index, tensors in self.tensors.items()
        }

    def round(
        self, block: LoadedBlock, stream: Stream, found: BlockSites, workers: Workers
    ) -> Iterator[tuple[Site, SiteStats]]:
        """Sweep the matrices of the next block, and put what the file will say into it; every site
        with its sum of squares, as it was before."""
        parts = self._parts(block.index, found)
        rest = [site for site in found.sites if site.id not in parts]
        seen = collect(block, stream, rest, {"square"}, workers)
        yield from ((site, seen[site.id]) for site in rest)
        swept: list[_Swept] = []
        wanted = [site for site in found.sites if site.id in parts]
        with self._file(block.index).open("wb") as file:
            work = partial(self._sweep, block=block, descriptor=file.fileno())
            for group in groups_of(wanted, self.gram_bytes):
                stats = collect(block, stream, group, {"gram"}, workers)
                yield from ((site, _squares(stats[site.id])) for site in group)
                give_back()
                jobs = [(site, parts[site.id], stats) for site in sorted(group, key=_cost)]
                swept += [one for made in workers.map(work, jobs) for one in made]
        self._keep(block.index, swept)

    def _parts(self, index: int, found: BlockSites) -> dict[str, list[_Part]]:
        """The matrices that are swept, by the id of the site that they read."""
        by_name: dict[str, dict[int, Site]] = defaultdict(dict)
        for site in found.sites:
            for name in site.names:
                by_name[name][-1 if site.expert is None else site.expert] = site
        parts: dict[str, list[_Part]] = defaultdict(list)
        start = 0
        for tensor in self.tensors.get(index, ()):
            sites = matrices_reading(tensor.source, by_name, lambda site: site.in_features)
            matrices, rows = matrices_of(tensor)
            nbytes = rows * tensor.type.row_bytes(tensor.source.in_features)
            for matrix, site in enumerate(sites):
                parts[site.id].append(_Part(tensor, matrix, start + matrix * nbytes))
            if sites:
                self._starts[tensor.name] = index, start
                start += matrices * nbytes
        return parts

    def _sweep(
        self,
        job: tuple[Site, Sequence[_Part], dict[str, SiteStats]],
        block: LoadedBlock,
        descriptor: int,
    ) -> list[_Swept]:
        """The matrices that read one site. Takes its own of the stats, which are large."""
        site, parts, stats = job
        seen = stats.pop(site.id)
        given: gptq.Factor | None = None
        notes: tuple[str, ...] = ()
        if seen.gram is None or is_rare(site, seen):
            if site.expert is None:  # of experts it is said how many they are
                few = f"was seen for fewer than {MIN_EXPERT_TOKENS} tokens"
                notes = (f"the input of {parts[0].tensor.name} {few}; not swept",)
        else:
            where = f"the input of {parts[0].tensor.name}"
            with methods.named(where):
                given = gptq.factor(seen.gram, self.options, seen.count)
            notes = tuple(f"{where}: {note}" for note in given.notes)
        made = []
        for part in parts:
            made.append(_swept(part, block, seen, given, descriptor, notes))
            notes = ()
        return made

    def _keep(self, index: int, swept: Sequence[_Swept]) -> None:
        tensors: dict[str, dict[str, Any]] = {}
        for one in sorted(swept, key=lambda one: (one.name, one.matrix)):
            known = tensors.setdefault(
                one.name,
                {"sums": [], "start": self._starts[one.name][1], "signal": 0.0, "noise": 0.0},
            )
            known["sums"].append(one.checksum)
            known["signal"] += one.signal
            known["noise"] += one.noise
        notes = merged([note for one in swept for note in one.notes])
        self.kept.append({"tensors": tensors, "notes": notes})

    def restore(self, kept: Any) -> bool:
        """Take up what was kept of the next block; False where it, or its file, is damaged."""
        index = len(self.kept)
        known = {tensor.name: tensor for tensor in self.tensors.get(index, ())}
        try:
            for name, entry in kept["tensors"].items():
                start, sums = int(entry["start"]), list(entry["sums"])
                float(entry["signal"]), float(entry["noise"])
                matrices, rows = matrices_of(known[name])
                nbytes = rows * known[name].type.row_bytes(known[name].source.in_features)
                if len(sums) != matrices:
                    return False
                for matrix, expected in enumerate(sums):
                    if checksum(self._read(index, start + matrix * nbytes, nbytes)) != expected:
                        return False
                self._starts[name] = index, start
            good = isinstance(kept["notes"], list)
        except (AttributeError, KeyError, OSError, TypeError, ValueError):
            return False
        self.kept += [kept] if good else []
        return good

    def rows(self, tensor: PlannedTensor, first: int, last: int) -> NDArray[np.uint8] | None:
        """Blocks of some rows, uint8 [last - first, bytes of a row]; None of what is not swept."""
        place = self._starts.get(tensor.name)
        if place is None:
            return None
        row_bytes = tensor.type.row_bytes(tensor.source.in_features)
        index, start = place
        raw = self._read(index, start + first * row_bytes, (last - first) * row_bytes)
        return raw.reshape(last - first, row_bytes)

    def error(self, name: str) -> float | None:
        """sqrt(tr(E H E') / tr(W H W')) of a tensor that was swept."""
        if name not in self._starts:
            return None
        entry = self.kept[self._starts[name][0]]["tensors"][name]
        signal, noise = entry["signal"], max(entry["noise"], 0.0)
        return float(np.sqrt(noise / signal)) if signal > 0 else 0.0

    @property
    def notes(self) -> list[str]:
        """Sentences for the summary."""
        return merged([note for kept in self.kept for note in kept["notes"]])

    def _file(self, index: int) -> Path:
        return self.folder / f"swept-{index}"

    def _read(self, index: int, start: int, nbytes: int) -> NDArray[np.uint8]:
        found = np.fromfile(self._file(index), np.uint8, nbytes, offset=start)
        if found.size != nbytes:
            raise OSError(f"{self._file(index)} ends early")
        return found


def _squares(seen: SiteStats) -> SiteStats:
    square = None if seen.gram is None else np.diagonal(seen.gram).copy()
    return SiteStats(seen.count, square=square)


def _cost(site: Site) -> int:
    """The widest first, so that threads end together."""
    return -site.in_features


def _swept(
    part: _Part,
    block: LoadedBlock,
    seen: SiteStats,
    given: gptq.Factor | None,
    descriptor: int,
    notes: tuple[str, ...],
) -> _Swept:
    """One matrix, some rows at a time: into the file, and into the decoder block."""
    tensor, width = part.tensor, part.tensor.source.in_features
    rows = matrices_of(tensor)[1]
    row_bytes = tensor.type.row_bytes(width)
    step, every = max(1, _AT_ONCE // width), max(1, rows // _REPORTED_ROWS)
    signal = noise = 0.0
    summed = 0
    parts: list[NDArray[np.uint8]] = []
    for first in range(0, rows, step):
        last = min(rows, first + step)
        start = part.matrix * rows
        weight = floats_of(tensor, start + first, start + last)
        blocks = blocks_of(weight, tensor.type, seen.gram, given)
        back = native_gguf.dequantize(blocks, tensor.type, width, threads=1)
        _write(descriptor, blocks, part.start + first * row_bytes)
        parts.append(blocks)
        if seen.gram is not None:
            kept = slice(-first % every, None, every)
            gram, some = torch.from_numpy(seen.gram), torch.from_numpy(weight[kept])
            lost = some - torch.from_numpy(back[kept])
            signal += float(((some @ gram) * some).sum(dtype=torch.float64))
            noise += float(((lost @ gram) * lost).sum(dtype=torch.float64))
        _put_back(block, tensor, start + first, back)
    summed = checksum(np.concatenate(parts).reshape(-1))
    return _Swept(tensor.name, part.matrix, summed, signal, noise, notes)


def blocks_of(
    weight: Floats, type_: BlockType, gram: Floats | None, given: gptq.Factor | None
) -> NDArray[np.uint8]:
    """Blocks of weight [out, in]; with the Gram matrix of its input, and the factor of that, codes
    are the sweep's."""
    if gram is None or given is None:
        return native_gguf.encode(weight, type_, threads=1)
    square = np.diagonal(gram)
    least = _LEAST * (square.mean() or np.float32(1))
    importance = np.sqrt(given.importance * np.maximum(square, least))
    blocks = native_gguf.encode(weight, type_, importance, threads=1)
    found = levels(blocks, type_, weight.shape[1])
    finite = np.isfinite(found.scale).all()
    if found.offset is not None:
        finite &= np.isfinite(found.offset).all()
    if finite:  # what does not fit the type is refused when the blocks are written
        codes = native.gptq_sweep_levels(
            weight, np.asarray(given.upper), order=given.order, levels=found, threads=1
        )
        put_codes(blocks, type_, codes)
    return blocks


def _write(descriptor: int, blocks: NDArray[np.uint8], start: int) -> None:
    left = blocks.reshape(-1).data
    while left:
        done = os.pwrite(descriptor, left, start)
        left, start = left[done:], start + done


def _put_back(block: LoadedBlock, tensor: PlannedTensor, first: int, values: Floats) -> None:
    """Rows of a tensor, from `first` on, to where the decoder block has them."""
    source = tensor.source
    rows = np.arange(first, first + len(values), dtype=np.int64)
    if source.order is not None:
        rows = source.order(rows)
    start = 0
    for name in source.origin:
        there = block.weights[name]
        count = there[..., 0].numel()
        own = (rows >= start) & (rows < start + count)
        if own.any():
            place = torch.from_numpy(rows[own] - start)
            at = (place,) if there.ndim == 2 else (place // there.shape[1], place % there.shape[1])
            there[at] = torch.from_numpy(values[own])
        start += count
