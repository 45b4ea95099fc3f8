"""Experts that a checkpoint keeps fused in 3-D tensors, seen as one matrix each.

    ...experts.gate_up_proj [experts, 2 * inner, hidden]
        -> ...experts.3.gate_proj.weight [inner, hidden], ...experts.3.up_proj.weight
    ...experts.down_proj [experts, hidden, inner]
        -> ...experts.3.down_proj.weight [hidden, inner]

Laid out like this (Qwen3.5-MoE, Gemma 4) each matrix is a stretch of the file, and nothing but
headers differs from a checkpoint with experts apart. Others keep the transpose, [experts, in, out]
(Qwen3-VL-MoE, Llama 4): there the columns of a matrix are read, a band of stored rows at a time.
Granite has other names for the same, `block_sparse_moe.input_linear` and `output_linear`.

The names are those under which Qwen3-MoE's checkpoints keep experts, and engines ask for quantized
ones (artifacts of llm-compressor). Layers with biases interleave gate and up (gpt-oss): these can
be seen as two matrices an expert, `...experts.3.gate_up_proj.weight` and `down_proj.weight`, which
its own format is made of. Any other shapes stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.single_experts import Stacked
from qtool.errors import UnsupportedError
from qtool.formats.layer_names import experts_of
from qtool.formats.mxfp4_experts import misnamed
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo

GATE_UP, DOWN = "gate_up_proj", "down_proj"
PARTS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: (DOWN,)}
WHOLE = {GATE_UP: (GATE_UP,), DOWN: (DOWN,)}  # where gate and up are interleaved
_GRANITE, _GRANITES = ".block_sparse_moe", ("input_linear", "output_linear")
_PAIRS = ((GATE_UP, DOWN), _GRANITES)
_BAND_BYTES = 1 << 22  # of a transposed matrix, read at once


@dataclass(frozen=True)
class Fused:
    """The fused experts of one layer, by their tensors."""

    layer: str  # "model.layers.0.mlp.experts"
    gate_up: TensorInfo
    down: TensorInfo
    transposed: bool  # [experts, in, out]
    interleaved: bool = False  # rows of gate and up alternate


@dataclass(frozen=True)
class Columns:
    """A matrix [out, in] as columns of a stored one [in, all outputs]."""

    stored: TensorInfo
    first: int


def stack_of(stem: str) -> tuple[str, str] | None:
    """Of a fused tensor, without `.weight`: the layer `...experts`, and which of PARTS it holds."""
    before, _, last = stem.rpartition(".")
    if last in PARTS and before.endswith(".experts"):
        return before, last
    if last in _GRANITES and before.endswith(_GRANITE):
        return f"{before}.experts", (GATE_UP, DOWN)[_GRANITES.index(last)]
    return None


def tensors_of(layer: str, kind: str) -> tuple[str, ...]:
    """Of a layer `...experts` and one of PARTS: what checkpoints may call its fused tensor, the
    rarer name first."""
    names = [f"{layer}.{kind}"]
    before = layer.removesuffix(".experts")
    if before.endswith(_GRANITE):
        names.insert(0, f"{before}.{_GRANITES[(GATE_UP, DOWN).index(kind)]}.weight")
    return tuple(names)


def layout_of(gate_up: tuple[int, ...], down: tuple[int, ...]) -> str | None:
    """`linear` for [experts, 2 * inner, hidden] and [experts, hidden, inner], `transposed` for
    [experts, hidden, 2 * inner] and [experts, inner, hidden], None for anything else."""
    if not len(gate_up) == len(down) == 3 or gate_up[0] != down[0] or 0 in gate_up:
        return None
    if gate_up[1:] == (2 * down[2], down[1]):
        return "linear"
    return "transposed" if gate_up[1:] == (down[2], 2 * down[1]) else None


def fused_layers(tensors: Mapping[str, TensorInfo], interleaved: bool = False) -> Iterator[Fused]:
    """The layers whose experts can be seen apart; or those with gate and up interleaved."""
    for name, gate_up in tensors.items():
        stem = name.removesuffix(".weight")
        layer, kind = stack_of(stem) or ("", "")
        if kind != GATE_UP:
            continue
        before, _, last = stem.rpartition(".")
        other = next(down for up, down in _PAIRS if up == last)
        down = tensors.get(f"{before}.{other}{name[len(stem) :]}")
        if down is None or (f"{stem}_bias" in tensors) != interleaved:
            continue
        layout = layout_of(gate_up.shape, down.shape)
        known = layout == "transposed" or (layout is not None and not interleaved)
        if known and {gate_up.dtype, down.dtype} <= set(FLOAT_DTYPES):
            yield Fused(layer, gate_up, down, layout == "transposed", interleaved)


def matrices(
    tensors: Mapping[str, TensorInfo], interleaved: bool = False
) -> dict[str, tuple[str, ...]]:
    """Of each fused tensor that can be seen apart: the names of its matrices."""
    return {
        info.name: tuple(piece.name for piece, _ in _pieces(fused, info))
        for fused in fused_layers(tensors, interleaved)
        for info in (fused.gate_up, fused.down)
    }


@dataclass(frozen=True)
class Apart(Stacked):
    """See Checkpoint. Some matrices are columns of what lies in the files."""

    columns: Mapping[str, Columns] = field(default_factory=dict, repr=False)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [nbytes]."""
        if name not in self.columns:
            return super().raw(name)
        return self.part(name, 0, self.tensors[name].shape[0])

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis."""
        source = self.columns.get(name)
        if source is None:
            return super().part(name, first, last)
        stored, (_, rows) = source.stored, self.tensors[name].shape
        width = stored.nbytes // prod(stored.shape)
        # As integers: byte by byte it takes seven times as long.
        found = np.empty((last - first, rows), f"u{width}")
        step = max(1, _BAND_BYTES * rows // stored.nbytes)
        begin, end = source.first + first, source.first + last
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            row = stored.nbytes // rows
            span = replace(stored, start=stored.start + start * row, end=stored.start + stop * row)
            band = self._read(name, span).view(found.dtype)
            found[:, start:stop] = band.reshape(stop - start, -1)[:, begin:end].T
        return found.reshape(-1).view(np.uint8)

    def stretch(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of a tensor from `start` to `stop`."""
        if name not in self.columns:
            return super().stretch(name, start, stop)
        return self._stretch_of_part(name, start, stop)


def apart(
    checkpoint: Checkpoint,
    wanted: Callable[[str], bool] = lambda layer: True,
    interleaved: bool = False,
) -> Checkpoint:
    """The checkpoint with a matrix an expert, in layers that are wanted, by `...experts`.
    interleaved: see fused_layers."""
    split = {
        info.name: fused
        for fused in fused_layers(checkpoint.tensors, interleaved)
        if wanted(fused.layer)
        for info in (fused.gate_up, fused.down)
    }
    if not split:
        return checkpoint
    if type(checkpoint) not in (Checkpoint, Stacked, Apart):  # what a view makes lies in no file
        raise UnsupportedError(
            f"{checkpoint.path}: {next(iter(split))} holds fused experts, which are taken apart as "
            "they lie in a plain checkpoint; make one first, with `qtool convert MODEL --to hf`"
        )
    stacks = dict(checkpoint.stacks) if isinstance(checkpoint, Stacked) else {}
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    columns: dict[str, Columns] = {}
    for name, info in checkpoint.tensors.items():
        pieces = _pieces(split[name], info) if name in split else [(info, None)]
        singles = stacks.pop(name, ()) if name in split else ()
        for piece, source in pieces:
            tensors[piece.name] = piece
            files[piece.name] = checkpoint.file_of(name)
            if source is not None and not singles:
                columns[piece.name] = source
        for (piece, _), single in zip(pieces, singles, strict=False):  # one an expert
            tensors[piece.name] = replace(single.info, name=piece.name)
            files[piece.name] = single.file
    return Apart(
        checkpoint.path, checkpoint.config, tensors, checkpoint.metadata, checkpoint.files, files,
        checkpoint.readable, stacks, columns, watch=checkpoint.watch,
    )  # fmt: skip


def well_named(checkpoint: Checkpoint) -> Checkpoint:
    """gpt-oss's experts under their own names, where they were saved under those of blocks."""
    others = misnamed(checkpoint.tensors)
    if not others:
        return checkpoint
    return replace(
        checkpoint,
        tensors={
            others.get(name, name): replace(info, name=others.get(name, name))
            for name, info in checkpoint.tensors.items()
        },
        _file_of={others.get(n, n): checkpoint.file_of(n) for n in checkpoint.tensors},
    )


def all_apart(
    checkpoint: Checkpoint, wanted: Callable[[str], bool] = lambda layer: True
) -> Checkpoint:
    """The same, whether gate and up are interleaved or not."""
    view = apart(checkpoint, wanted)
    return apart(checkpoint, wanted, interleaved=True) if view is checkpoint else view


def apart_as(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """The checkpoint with experts apart in those layers of which `names` has single ones."""
    layers = {found[0] for name in names if (found := experts_of(name))}
    return all_apart(checkpoint, layers.__contains__)


def _pieces(fused: Fused, info: TensorInfo) -> list[tuple[TensorInfo, Columns | None]]:
    """The matrices in a fused tensor, in the order of its bytes, or of its columns."""
    experts, rows, columns = info.shape
    _, kind = stack_of(info.name.removesuffix(".weight")) or ("", "")
    parts = (WHOLE if fused.interleaved else PARTS)[kind]
    if fused.transposed:
        rows, columns = columns, rows
    rows //= len(parts)
    each = info.nbytes // experts
    size = each // len(parts)
    found: list[tuple[TensorInfo, Columns | None]] = []
    for expert in range(experts):
        begin = info.start + expert * each
        whole = TensorInfo(info.name, info.dtype, info.shape[1:], begin, begin + each)
        for number, part in enumerate(parts):
            first = begin + number * size
            name = f"{fused.layer}.{expert}.{part}.weight"
            piece = TensorInfo(name, info.dtype, (rows, columns), first, first + size)
            source = Columns(whole, number * rows) if fused.transposed else None
            found.append((piece, source))
    return found
