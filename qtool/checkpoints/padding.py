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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint, View
from qtool.checkpoints.feed_forward import (
    DOWN,
    KEY,
    UP,
    Pad,
    keys_of,
    layers_of,
    refused,
    width_said,
)
from qtool.errors import UnsupportedError
from qtool.formats.safetensors_file import TensorInfo

__all__ = ["KEY", "Pad", "Padded", "padded", "padded_as"]

_ALWAYS = "always zero"


@dataclass(frozen=True)
class Padded(View):
    """See Checkpoint. Some tensors are wider than in the files."""

    pads: Mapping[str, Pad] = field(default_factory=dict, repr=False)

    @property
    def widths(self) -> Mapping[str, int]:
        """The keys of config.json that say another width than the source's."""
        new = structure.text_config(self.config)
        old = structure.text_config(self.original.config)
        return {
            key: width for key in old if new[key] != old[key] and (width := width_said(new, key))
        }

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
        return self._stretch_of_part(name, start, stop)


def padded(checkpoint: Checkpoint, multiple: int) -> Checkpoint:
    """The checkpoint with every intermediate width padded to a multiple of `multiple`; itself where
    all are one, or for 0. UnsupportedError where a layer is not understood."""
    if multiple < 2:
        return checkpoint
    return _padded(checkpoint, lambda key, width: -(-width // multiple) * multiple)


def padded_as(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with the intermediate widths that another config.json has, where these are
    larger; itself where none is, or where a layer is not understood."""
    wanted = structure.text_config(config)

    def target(key: str, width: int) -> int:
        return max(width_said(wanted, key) or 0, width)

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
    if last in DOWN:
        return rows, -(-columns // multiple) * multiple
    return (-(-rows // multiple) * multiple, columns) if last in UP else shape


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
    return any(f".{name}" in note for name in (*DOWN, "ffn_down"))


def may_be_padded(name: str) -> bool:
    """Whether a matrix is, by its name, one that padding widens."""
    return name.removesuffix(".weight").rpartition(".")[2] in (*UP, *DOWN)


def asked_in(recipe: object) -> int:
    """The multiple that a recorded recipe padded to; 0 where it did not."""
    found = recipe.get(KEY) if isinstance(recipe, Mapping) else None
    return found if type(found) is int and found > 1 else 0


def not_compared(multiple: int) -> str:
    """The sentence where a padded model is to be compared with what is no checkpoint."""
    return (
        f"the model was padded ({KEY} {multiple}) and the model given is no checkpoint of "
        "safetensors: they are not compared; give the folder that it was made of"
    )


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
    grown = ", ".join(f"{key} {width_said(old, key)} -> {new}" for key, new in found.widths.items())
    more = sum(prod(one.shape) for one in found.tensors.values())
    before = sum(prod(one.shape) for one in found.original.tensors.values())
    return [f"note: padded with zeros: {grown}; {more / before - 1:.1%} more weights"]


def _padded(checkpoint: Checkpoint, target: Callable[[str, int], int]) -> Checkpoint:
    if structure.packed(checkpoint.tensors) is not None:
        return checkpoint  # which says for itself what is wrong with it
    text = structure.text_config(checkpoint.config)
    layers = list(layers_of(checkpoint))
    if not layers:
        raise refused(checkpoint, "no feed-forward layer is known by its names")
    widths: dict[str, int] = {}  # that config.json is going to say
    tensors, pads = dict(checkpoint.tensors), dict[str, Pad]()
    for layer in layers:
        keys, times = keys_of(checkpoint, layer, text)
        each = layer.width // times
        width = times * max(target(key, each) for key in keys if width_said(text, key) == each)
        for key in keys:
            said = width // times if width_said(text, key) == each else width
            if widths.setdefault(key, said) != said:
                why = f"{key} would have to be {widths[key]} and {said}"
                raise refused(checkpoint, f"{why} for layers of one model")
        if width == layer.width:
            continue
        if width == layer.unlike:
            raise refused(
                checkpoint,
                f"{layer.module} would be as wide as its inputs, {width}, and nobody could tell "
                "which way around its experts lie; take another multiple",
            )
        for name, pad in layer.pads.items():
            tensors[name], pads[name] = _wider(tensors[name], pad, width), pad
    if not pads:
        return checkpoint
    if text.get("activation_sparsity_pattern"):
        raise refused(checkpoint, "activation_sparsity_pattern takes a mean over that width")
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


def _wider(info: TensorInfo, pad: Pad, width: int) -> TensorInfo:
    shape = list(info.shape)
    shape[pad.axis] = pad.parts * width
    nbytes = info.nbytes // prod(info.shape) * prod(shape)
    return TensorInfo(info.name, info.dtype, tuple(shape), 0, nbytes)
