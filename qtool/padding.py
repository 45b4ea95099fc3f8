"""Feed-forward layers padded with zeros: a checkpoint whose intermediate widths are wider.

    gate, up    [inner, hidden] -> [padded, hidden]    rows of zeros at the end; of matrices that
                                                       hold both, at the end of each half
    down        [hidden, inner] -> [hidden, padded]    columns of zeros
    config.json the key that says `inner` says `padded`

The layer computes what it did: its new channels are multiplied by zeros. Engines that share a width
between GPUs, and formats whose groups or blocks are a fixed size, want widths that are multiples of
something; the hidden width cannot be padded, as norms take a mean over it.

No table of models: a feed-forward layer is a module with matrices of these names and of shapes that
fit each other, and its width is that which config.json says. What is in a module beside them and
has that width, such as a norm, is not understood and refused, and so are experts in tensors of
other kinds.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import structure
from qtool.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo
from qtool.fused_experts import fused_layers
from qtool.layer_names import experts_of

KEY = "pad_intermediate"
_ALWAYS = "always zero"
_UP = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h",
       "input_linear")  # fmt: skip
_DOWN = ("down_proj", "w2", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "output_linear")
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
class _Layer:
    """A feed-forward layer, or all experts of one that are fused."""

    module: str
    kind: str  # a key of _KEYS
    width: int
    pads: Mapping[str, Pad]
    unlike: int = 0  # a width that it must not get


@dataclass(frozen=True)
class Padded(Checkpoint):
    """See Checkpoint. Some tensors are wider than in the files."""

    source: Checkpoint | None = None
    pads: Mapping[str, Pad] = field(default_factory=dict, repr=False)

    @property
    def original(self) -> Checkpoint:
        """What it is a view of."""
        assert self.source is not None
        return self.source

    @property
    def widths(self) -> Mapping[str, int]:
        """The keys of config.json that say another width than the source's."""
        new = structure.text_config(self.config)
        old = structure.text_config(self.original.config)
        return {key: width for key in old if new[key] != old[key] and (width := _said(new, key))}

    def digest(self) -> str:
        """That of the source: padding is part of the recipe."""
        return self.original.digest()

    @property
    def file_digests(self) -> Mapping[str, str]:
        """Those of the source."""
        return self.original.file_digests

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [nbytes]."""
        if name not in self.pads:
            return self.original.raw(name)
        return self.part(name, 0, self.tensors[name].shape[0])

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis."""
        pad = self.pads.get(name)
        if pad is None:
            return self.original.part(name, first, last)
        new, old = self.tensors[name], self.original.tensors[name].shape
        row = new.nbytes // new.shape[0]
        if pad.axis == 0:
            return self._rows(name, first, last, row)
        found = np.zeros((last - first) * row, np.uint8)
        if outer := (last - first) * prod(old[1 : pad.axis]) * pad.parts:
            narrow = self.original.part(name, first, last).reshape(outer, -1)
            found.reshape(outer, -1)[:, : narrow.shape[1]] = narrow
        return found

    def _rows(self, name: str, first: int, last: int, row: int) -> NDArray[np.uint8]:
        """Rows of a tensor that has more of them than its source."""
        parts = self.pads[name].parts
        wide = self.tensors[name].shape[0] // parts
        narrow = self.original.tensors[name].shape[0] // parts
        found = np.zeros((last - first) * row, np.uint8)
        for part in range(parts):
            begin, end = max(first, part * wide), min(last, part * wide + narrow)
            if begin < end:
                shift = part * (wide - narrow)
                found[(begin - first) * row : (end - first) * row] = self.original.part(
                    name, begin - shift, end - shift
                )
        return found

    def stretch(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of a tensor from `start` to `stop`."""
        if name not in self.pads:
            return self.original.stretch(name, start, stop)
        info = self.tensors[name]
        row = info.nbytes // info.shape[0]
        first = start // row
        rows = self.part(name, first, max(first, -(-stop // row)))
        return rows[start - first * row : stop - first * row]


def padded(checkpoint: Checkpoint, multiple: int) -> Checkpoint:
    """The checkpoint with every intermediate width padded to a multiple of `multiple`; itself where
    all are one. UnsupportedError where a layer is not understood."""
    return _padded(checkpoint, lambda key, width: -(-width // multiple) * multiple)


def padded_as(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with the intermediate widths that another config.json has, where these are
    larger; itself where none is, or where a layer is not understood."""
    wanted = structure.text_config(config)

    def target(key: str, width: int) -> int:
        return max(_said(wanted, key) or 0, width)

    try:
        return _padded(checkpoint, target)
    except UnsupportedError:
        return checkpoint


def advice(multiple: int, width: int | None = None) -> str:
    """What a user may do about a width, which then is as large as is said."""
    to = "" if width is None else f" (zeros up to {-(-width // multiple) * multiple})"
    return f"quantize with --set {KEY}={multiple}{to}"


def shape_padded(name: str, shape: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Of a matrix [out, in], by its name; its own where padding leaves it."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    if len(shape) != 2:
        return shape
    rows, columns = shape
    if last in _DOWN:
        return rows, -(-columns // multiple) * multiple
    return (-(-rows // multiple) * multiple, columns) if last in _UP else shape


def explained(notes: Iterable[str], multiple: int) -> list[str]:
    """Notes on a run that pads: inputs that are always zero are so because of that."""
    found = [*notes]
    if multiple < 2:
        return found
    return [
        f"{note}, those of padding among them" if _ALWAYS in note and _reads_inner(note) else note
        for note in found
    ]


def _reads_inner(note: str) -> bool:
    return any(f".{name}" in note for name in (*_DOWN, "ffn_down"))


def may_be_padded(name: str) -> bool:
    """Whether a matrix is, by its name, one that padding widens."""
    return name.removesuffix(".weight").rpartition(".")[2] in (*_UP, *_DOWN)


def asked_in(recipe: object) -> int:
    """The multiple that a recorded recipe padded to; 0 where it did not."""
    found = recipe.get(KEY) if isinstance(recipe, Mapping) else None
    return found if type(found) is int and found > 1 else 0


def in_view(view: object) -> Padded | None:
    """What was padded of a checkpoint, below other views of it."""
    while view is not None and not isinstance(view, Padded):
        view = getattr(view, "source", None)
    return view


def said(checkpoint: Checkpoint) -> list[str]:
    """A note on what a view has padded."""
    if (found := in_view(checkpoint)) is None:
        return []
    old = structure.text_config(found.original.config)
    grown = ", ".join(f"{key} {_said(old, key)} -> {new}" for key, new in found.widths.items())
    more = sum(prod(one.shape) for one in found.tensors.values())
    before = sum(prod(one.shape) for one in found.original.tensors.values())
    return [f"note: padded with zeros: {grown}; {more / before - 1:.1%} more weights"]


def _padded(checkpoint: Checkpoint, target: Callable[[str, int], int]) -> Checkpoint:
    if structure.packed(checkpoint.tensors) is not None:
        return checkpoint  # which says for itself what is wrong with it
    text = structure.text_config(checkpoint.config)
    layers = list(_layers(checkpoint))
    if not layers:
        raise _refused(checkpoint, "no feed-forward layer is known by its names")
    widths: dict[str, int] = {}  # that config.json is going to say
    tensors, pads = dict(checkpoint.tensors), dict[str, Pad]()
    for layer in layers:
        keys, times = _keys(checkpoint, layer, text)
        each = layer.width // times
        width = times * max(target(key, each) for key in keys if _said(text, key) == each)
        for key in keys:
            said = width // times if _said(text, key) == each else width
            if widths.setdefault(key, said) != said:
                why = f"{key} would have to be {widths[key]} and {said}"
                raise _refused(checkpoint, f"{why} for layers of one model")
        if width == layer.width:
            continue
        if width == layer.unlike:
            raise _refused(
                checkpoint,
                f"{layer.module} would be as wide as its inputs, {width}, and nobody could tell "
                "which way around its experts lie; take another multiple",
            )
        for name, pad in layer.pads.items():
            tensors[name], pads[name] = _wider(tensors[name], pad, width), pad
    if not pads:
        return checkpoint
    if text.get("activation_sparsity_pattern"):
        raise _refused(checkpoint, "activation_sparsity_pattern takes a mean over that width")
    config = json.loads(json.dumps(dict(checkpoint.config)))
    inner = structure.text_config(config)
    assert isinstance(inner, dict)
    for key, width in widths.items():
        old = inner[key]
        inner[key] = [width] * len(old) if isinstance(old, list) else width
    files: dict[str, Path] = {name: checkpoint.file_of(name) for name in tensors}
    return Padded(
        checkpoint.path, config, tensors, checkpoint.metadata, checkpoint.files, files,
        checkpoint.readable, checkpoint, pads,
    )  # fmt: skip


def _said(text: Mapping[str, Any], key: str) -> int | None:
    """The width under a key: a number, or a list of one number for each block."""
    found = text.get(key)
    if isinstance(found, list) and found and all(one == found[0] for one in found):
        found = found[0]
    return found if type(found) is int else None


def _wider(info: TensorInfo, pad: Pad, width: int) -> TensorInfo:
    shape = list(info.shape)
    shape[pad.axis] = pad.parts * width
    nbytes = info.nbytes // prod(info.shape) * prod(shape)
    return TensorInfo(info.name, info.dtype, tuple(shape), 0, nbytes)


def _keys(checkpoint: Checkpoint, layer: _Layer, text: Mapping[str, Any]) -> tuple[list[str], int]:
    """All keys of config.json that say a layer's width, and how many such widths it has: engines
    and transformers may go by different ones."""
    counts = [n for key in _COUNTS if type(n := text.get(key)) is int and n > 1]
    for times in (*(counts if layer.kind == "shared" else ()), 1):
        of_one = ("moe_intermediate_size", *_SHARED_KEYS) if times > 1 else _KEYS[layer.kind]
        found = [key for key in of_one if (_said(text, key) or 0) * times == layer.width]
        if found:
            also = [key for key in _SHARED_KEYS if _said(text, key) == layer.width]
            return [*found, *(key for key in also if key not in found)], times
    raise _refused(
        checkpoint,
        f"{layer.module} is {layer.width} wide, and of the keys of config.json that could say so "
        f"({', '.join(_KEYS[layer.kind])}) none does",
    )


def _layers(checkpoint: Checkpoint) -> Iterator[_Layer]:
    """The feed-forward layers of the decoder, fused experts among them."""
    tensors = checkpoint.tensors
    fused_names = set[str]()
    for fused in fused_layers(tensors):
        axes = (2, 1) if fused.transposed else (1, 2)
        fused_names |= {fused.gate_up.name, fused.down.name}
        pads = {fused.gate_up.name: Pad(axes[0], 2), fused.down.name: Pad(axes[1], 1)}
        # Who reads it tells by shapes which way around it lies.
        hidden = fused.down.shape[3 - axes[1]] if fused.transposed else 0
        yield _Layer(fused.layer, "experts", fused.down.shape[axes[1]], pads, hidden)
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        if name in fused_names:
            continue
        module, _, last = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        if last in ("weight", "bias") and not structure.OTHER_TOWERS.search(parent):
            modules.setdefault(parent, {})[f"{part}.{last}"] = info
    for module, parts in modules.items():
        down = [name for name in _DOWN if f"{name}.weight" in parts]
        up = [name for name in _UP if f"{name}.weight" in parts]
        if down and up:
            yield _layer(checkpoint, module, parts, up, down)
    for name, info in tensors.items():
        alone = name in fused_names or experts_of(name) is not None
        if not alone and len(info.shape) > 1 and "experts" in name.split("."):
            shape = list(info.shape)
            raise _refused(checkpoint, f"{name} {shape} holds experts in a way of its own")


def _layer(
    checkpoint: Checkpoint,
    module: str,
    parts: Mapping[str, TensorInfo],
    up: Iterable[str],
    down: list[str],
) -> _Layer:
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
        raise _refused(
            checkpoint, f"the matrices of {module} are of shapes that do not go together"
        )
    for info in parts.values():
        if (
            info.name not in pads
            and width in info.shape
            and info.name != f"{module}.{down[0]}.bias"
        ):
            raise _refused(checkpoint, f"{info.name}, {width} wide, is none of what is known there")
    if experts_of(f"{module}.weight") is not None:
        kind = "experts"
    else:
        kind = "shared" if set(_SHARED) & set(module.split(".")) else "mlp"
    return _Layer(module, kind, width, pads)


def _refused(checkpoint: Checkpoint, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{checkpoint.path}: its intermediate widths cannot be padded: {why}; leave {KEY} out "
        f"(--set {KEY}=0)"
    )
