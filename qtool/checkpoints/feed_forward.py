"""The feed-forward layers of a checkpoint, by names and shapes of their matrices, and the keys of
config.json that say how wide they are.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import fused_layers
from qtool.errors import UnsupportedError
from qtool.formats.layer_names import experts_of
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo

KEY = "pad_intermediate"
UP = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h",
       "input_linear")  # fmt: skip
DOWN = ("down_proj", "w2", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "output_linear")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_SHARED_KEYS = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)  # fmt: skip
# By kind of layer, the keys that may say its width; all that have it do.
_KEYS = {
    "experts": ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"),
    "shared": (*_SHARED_KEYS, "moe_intermediate_size", "intermediate_size"),
    "mlp": (
        "intermediate_size_mlp", "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner",
        "inner_dim",
    ),
}  # fmt: skip
_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


@dataclass(frozen=True)
class Pad:
    """What of a tensor grows: `parts` equal stretches of one axis, each filled up at its end."""

    axis: int
    parts: int


@dataclass(frozen=True)
class Layer:
    """A feed-forward layer, or all experts of one that are fused."""

    module: str
    kind: str  # a key of _KEYS
    width: int
    pads: Mapping[str, Pad]
    unlike: int = 0  # a width that it must not get


def layers_of(checkpoint: Checkpoint) -> Iterator[Layer]:
    """The feed-forward layers of the decoder, fused experts among them."""
    tensors = checkpoint.tensors
    fused_names = set[str]()
    for fused in fused_layers(tensors):
        axes = (2, 1) if fused.transposed else (1, 2)
        fused_names |= {fused.gate_up.name, fused.down.name}
        pads = {fused.gate_up.name: Pad(axes[0], 2), fused.down.name: Pad(axes[1], 1)}
        # Who reads it tells by shapes which way around it lies.
        hidden = fused.down.shape[3 - axes[1]] if fused.transposed else 0
        yield Layer(fused.layer, "experts", fused.down.shape[axes[1]], pads, hidden)
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        if name in fused_names:
            continue
        module, _, last = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        if last in ("weight", "bias") and not structure.OTHER_TOWERS.search(parent):
            modules.setdefault(parent, {})[f"{part}.{last}"] = info
    for module, parts in modules.items():
        down = [name for name in DOWN if f"{name}.weight" in parts]
        up = [name for name in UP if f"{name}.weight" in parts]
        if down and up:
            yield _layer(checkpoint, module, parts, up, down)
    for name, info in tensors.items():
        alone = name in fused_names or experts_of(name) is not None
        if not alone and len(info.shape) > 1 and "experts" in name.split("."):
            shape = list(info.shape)
            raise refused(checkpoint, f"{name} {shape} holds experts in a way of its own")


def _layer(
    checkpoint: Checkpoint,
    module: str,
    parts: Mapping[str, TensorInfo],
    up: Iterable[str],
    down: list[str],
) -> Layer:
    """parts: every tensor of the module's children, as `up_proj.weight`."""
    last = parts[f"{down[0]}.weight"]
    pads = {last.name: Pad(1, 1)}
    fits = len(down) == 1 and len(last.shape) == 2
    hidden, width = last.shape if fits else (0, 0)
    for name in up:
        first = parts[f"{name}.weight"]
        both = 1 + (name not in ("gate_proj", "up_proj") and first.shape[0] == 2 * width)
        fits = fits and first.shape == (both * width, hidden)
        pads[first.name] = Pad(0, both)
        if (bias := parts.get(f"{name}.bias")) is not None:
            fits = fits and bias.shape == (both * width,)
            pads[bias.name] = Pad(0, both)
    if not fits or any(checkpoint.tensors[name].dtype not in FLOAT_DTYPES for name in pads):
        raise refused(checkpoint, f"the matrices of {module} are of shapes that do not go together")
    for info in parts.values():
        if (
            info.name not in pads
            and width in info.shape
            and info.name != f"{module}.{down[0]}.bias"
        ):
            raise refused(checkpoint, f"{info.name}, {width} wide, is none of what is known there")
    if experts_of(f"{module}.weight") is not None:
        kind = "experts"
    else:
        kind = "shared" if set(_SHARED) & set(module.split(".")) else "mlp"
    return Layer(module, kind, width, pads)


def keys_of(checkpoint: Checkpoint, layer: Layer, text: Mapping[str, Any]) -> tuple[list[str], int]:
    """All keys of config.json that say a layer's width, and how many such widths it has: engines
    and transformers may go by different ones."""
    counts = [n for key in _COUNTS if type(n := text.get(key)) is int and n > 1]
    for times in (*(counts if layer.kind == "shared" else ()), 1):
        of_one = ("moe_intermediate_size", *_SHARED_KEYS) if times > 1 else _KEYS[layer.kind]
        found = [key for key in of_one if (width_said(text, key) or 0) * times == layer.width]
        if found:
            also = [key for key in _SHARED_KEYS if width_said(text, key) == layer.width]
            return [*found, *(key for key in also if key not in found)], times
    raise refused(
        checkpoint,
        f"{layer.module} is {layer.width} wide, and of the keys of config.json that could say so "
        f"({', '.join(_KEYS[layer.kind])}) none does",
    )


def width_said(text: Mapping[str, Any], key: str) -> int | None:
    """The width under a key: a number, or a list of one number for each block."""
    found = text.get(key)
    if isinstance(found, list) and found and all(one == found[0] for one in found):
        found = found[0]
    return found if type(found) is int else None


def refused(checkpoint: Checkpoint, why: str) -> UnsupportedError:
    """The error that says why a checkpoint is not padded."""
    return UnsupportedError(
        f"{checkpoint.path}: its intermediate widths cannot be padded: {why}; leave {KEY} out "
        f"(--set {KEY}=0)"
    )
