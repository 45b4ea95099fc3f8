"""Experts that a checkpoint keeps fused in 3-D tensors, seen as one matrix each.

    ...experts.gate_up_proj [experts, 2 * inner, hidden]
        -> ...experts.3.gate_proj.weight [inner, hidden], ...experts.3.up_proj.weight
    ...experts.down_proj [experts, hidden, inner]
        -> ...experts.3.down_proj.weight [hidden, inner]

Each matrix is a stretch of the file, rows of [out, in] as linear layers have them, so that the view
is a checkpoint with other headers and nothing is copied. The names are those under which other
checkpoints keep experts apart, and engines ask for quantized ones (Qwen3-MoE, and llm-compressor's
artifacts of Qwen3.5-MoE). Layers with biases interleave gate and up (gpt-oss), and some checkpoints
keep the transpose [experts, in, out] (Llama 4, Qwen3-VL-MoE): these stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from qtool.checkpoint import Checkpoint
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo
from qtool.layer_names import experts_of

GATE_UP, DOWN = "gate_up_proj", "down_proj"
PARTS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: (DOWN,)}


@dataclass(frozen=True)
class Fused:
    """The fused experts of one layer, by their tensors."""

    layer: str  # "model.layers.0.mlp.experts"
    gate_up: TensorInfo  # [experts, 2 * inner, hidden]
    down: TensorInfo  # [experts, hidden, inner]


def linear_layout(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether two shapes are [experts, 2 * inner, hidden] and [experts, hidden, inner]."""
    return (
        len(gate_up) == len(down) == 3
        and gate_up[0] == down[0] > 0
        and gate_up[1] == 2 * down[2] > 0
        and gate_up[2] == down[1] > 0
    )


def fused_layers(tensors: Mapping[str, TensorInfo]) -> Iterator[Fused]:
    """The layers whose experts can be seen apart."""
    for name, gate_up in tensors.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith(f".experts.{GATE_UP}"):
            continue
        layer = stem.removesuffix(f".{GATE_UP}")
        down = tensors.get(f"{layer}.{DOWN}{name[len(stem) :]}")
        if down is None or f"{stem}_bias" in tensors:
            continue
        floats = gate_up.dtype in FLOAT_DTYPES and down.dtype in FLOAT_DTYPES
        if floats and linear_layout(gate_up.shape, down.shape):
            yield Fused(layer, gate_up, down)


def apart(checkpoint: Checkpoint, wanted: Callable[[str], bool] = lambda layer: True) -> Checkpoint:
    """The checkpoint with a matrix an expert, in layers that are wanted, by `...experts`."""
    split = {
        info.name: fused.layer
        for fused in fused_layers(checkpoint.tensors)
        if wanted(fused.layer)
        for info in (fused.gate_up, fused.down)
    }
    if not split:
        return checkpoint
    tensors: dict[str, TensorInfo] = {}
    files = {}
    for name, info in checkpoint.tensors.items():
        pieces = _pieces(split[name], info) if name in split else [info]
        for piece in pieces:
            tensors[piece.name] = piece
            files[piece.name] = checkpoint.file_of(name)
    return replace(checkpoint, tensors=tensors, _file_of=files)


def apart_as(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """The checkpoint with experts apart in those layers of which `names` has single ones."""
    layers = {found[0] for name in names if (found := experts_of(name))}
    return apart(checkpoint, layers.__contains__)


def _pieces(layer: str, info: TensorInfo) -> list[TensorInfo]:
    """The matrices in a fused tensor, in the order of its bytes."""
    experts, rows, columns = info.shape
    kind = info.name.removesuffix(".weight").rpartition(".")[2]
    parts = PARTS[kind]
    rows //= len(parts)
    size = info.nbytes // (experts * len(parts))
    names = [f"{layer}.{expert}.{part}.weight" for expert in range(experts) for part in parts]
    return [
        TensorInfo(
            name, info.dtype, (rows, columns), info.start + n * size, info.start + (n + 1) * size
        )
        for n, name in enumerate(names)
    ]
