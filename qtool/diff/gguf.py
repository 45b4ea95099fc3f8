"""GGUF files as sides of a comparison; see qtool.diff.sides.

GgufSide         a GGUF file; llama.cpp's names
RenamedSide      one beside a checkpoint: the checkpoint's names, rows and config
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.decoder_names import alone_as, settings_alone
from qtool.checkpoints.fused_experts import apart_as
from qtool.checkpoints.gguf_models import gguf_models
from qtool.checkpoints.padding import padded_as
from qtool.diff.sides import CheckpointSide, Item, Side, Stored, flat, told_as
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind
from qtool.gguf.from_gguf import gguf_source
from qtool.gguf.inspect import plain
from qtool.gguf.open import open_source
from qtool.gguf.second_scales import SCALE, scales_in, with_scales
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf.statistics import numbers
from qtool.gguf.to_hf.hf_tensor import HfTensor, floats_of, put_back
from qtool.gguf.to_hf.model import HfModel, hf_model
from qtool.gguf_types import BY_NAME
from qtool.scheme import GroupQuant


@dataclass(frozen=True)
class GgufSide:
    """See Side. `views` are matrices that are read with their second scale, which the other side
    does not keep apart."""

    file: GgufFile
    views: Mapping[str, SourceTensor] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()  # tensors that are part of these

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def format(self) -> str:
        return "gguf"

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        found = {}
        for key, value in self.file.metadata.items():
            shown = plain(value)
            if value.kind is Kind.ARRAY and isinstance(shown, dict):
                raw = getattr(value.value, "stored", None) or repr(list(value.value)).encode()
                digest = hashlib.sha256(raw).hexdigest()[:16]
                shown = f"{value.element and value.element.name}[{len(value.value)}] {digest}"
            found[key] = shown
        return found

    @cached_property
    def items(self) -> Mapping[str, Item]:
        return {
            name: Item(name, i.shape, i.type.name, _scheme(i.type.name), i.nbytes)
            for name, i in self.file.tensors.items()
            if name not in self.gone
        }

    def stored(self, name: str) -> list[Stored]:
        info = self.file.tensors[name]
        if name in self.views:
            return [Stored("with a second scale", 0, lambda *_: np.empty(0, np.uint8))]

        def read(first: int, count: int) -> NDArray[np.uint8]:
            raw = np.empty(count, np.uint8)
            self.file.read_into(name, first, raw.data)
            return raw

        return [Stored(f"{info.type.name} {info.shape}", info.nbytes, read)]

    def quant(self, name: str) -> GroupQuant | None:
        return None

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        info = self.file.tensors[name]
        if name in self.views:
            return floats_of(self.views[name], first, last)
        raw = self.file.read_rows(name, first, last)
        return numbers(raw.reshape(-1), info.type).reshape(last - first, info.in_features)


def _scheme(type_name: str) -> str | None:
    return type_name if type_name in BY_NAME else None


@dataclass(frozen=True)
class RenamedSide:
    """See Side. `metadata` is the config.json that the file stands for."""

    source: GgufSource
    model: HfModel
    _read: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # the last one

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def format(self) -> str:
        return "gguf"

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        return dict(flat(self.model.config))

    @cached_property
    def _places(self) -> Mapping[str, tuple[HfTensor, int]]:
        tensors = self.model.tensors
        return {s.name: (t, place) for t in tensors for place, s in enumerate(t.specs)}

    @cached_property
    def items(self) -> Mapping[str, Item]:
        found = {}
        for name, (tensor, place) in self._places.items():
            shape, type_ = tensor.specs[place].shape, tensor.type
            nbytes = sum(one.nbytes for one in tensor.in_file) // len(tensor.specs)
            found[name] = Item(name, shape, type_.name, _scheme(type_.name), nbytes)
        return found

    def stored(self, name: str) -> list[Stored]:
        return [Stored("rows of another order", 0, lambda *_: np.empty(0, np.uint8))]

    def quant(self, name: str) -> GroupQuant | None:
        return None

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        tensor, place = self._places[name]
        if not tensor.module.rearranged:
            return tensor.values(place, first, last)
        if name not in self._read:  # heads are put back as a whole
            self._read.clear()
            values = put_back(tensor.source, tensor.module, tensor.groups)
            self._read[name] = values.reshape(-1, values.shape[-1])
        return self._read[name][first:last]


def open_sides(a: Path, b: Path) -> tuple[Side, Side]:
    """Both, under the same names where the one is GGUF and the other a checkpoint."""
    kinds = [bool(gguf_models(path)) for path in (a, b)]
    mixed = kinds[0] != kinds[1]
    sides = []
    for label, path, gguf in zip("AB", (a, b), kinds, strict=True):
        with told_as(label):
            sides.append(_open(path, gguf, mixed))
            _ = sides[-1].items  # where a config and tensors do not agree
    first, second = sides
    if isinstance(first, GgufSide) and isinstance(second, GgufSide):
        return _scaled_as(first, second), _scaled_as(second, first)
    first, second = _alone_as(first, second), _alone_as(second, first)
    first, second = _apart_as(first, second), _apart_as(second, first)
    return _padded_as(first, second), _padded_as(second, first)


def _scaled_as(side: GgufSide, other: GgufSide) -> GgufSide:
    """A file with second scales in its matrices, but for those that the other has apart, too."""
    own, there = _second_scales(side), _second_scales(other)
    if not own - there:
        return side
    source = gguf_source(side.file)
    seen = {tensor.name: tensor for tensor in with_scales(source, there).tensors}
    views = {name: seen[name] for name in own - there}
    return replace(side, views=views, gone=frozenset(side.file.tensors.keys() - seen.keys()))


def _second_scales(side: GgufSide) -> set[str]:
    """The matrices that have one."""
    if not any(name.endswith(SCALE) for name in side.file.tensors):
        return set()
    return {tensor.name for tensor, _ in scales_in(gguf_source(side.file))}


def _alone_as(side: Side, other: Side) -> Side:
    """A multimodal model, with its decoder named as alone where the other is a decoder."""
    if not isinstance(side, CheckpointSide) or side.artifact.found.format != "dense":
        return side
    if (config := _config_of(other)) is None:
        return side
    checkpoint = side.artifact.checkpoint
    seen = alone_as(checkpoint, config, other.items)
    if seen is checkpoint:
        return side
    seen = replace(seen, config=settings_alone(seen.config))
    return replace(side, artifact=replace(side.artifact, checkpoint=seen), inside=True)


def _apart_as(side: Side, other: Side) -> Side:
    """A checkpoint with experts fused in 3-D tensors, one by one where the other has them so."""
    if not isinstance(side, CheckpointSide) or side.artifact.found.format != "dense":
        return side
    checkpoint = apart_as(side.artifact.checkpoint, other.items)
    return replace(side, artifact=replace(side.artifact, checkpoint=checkpoint))


def _padded_as(side: Side, other: Side) -> Side:
    """A checkpoint with the intermediate widths of the other, where these are larger."""
    config = _config_of(other)
    if config is None or not isinstance(side, CheckpointSide):
        return side
    if side.artifact.found.format != "dense":
        return side
    checkpoint = side.artifact.checkpoint
    seen = padded_as(checkpoint, config)
    if seen is checkpoint:
        return side
    # That the widths differ is still to be told.
    artifact = Artifact.of(replace(seen, config=checkpoint.config))
    return replace(side, artifact=artifact, padded=True)


def _config_of(side: Side) -> Mapping[str, Any] | None:
    """The config.json that a model has, or would have."""
    if isinstance(side, RenamedSide):
        return side.model.config
    return side.artifact.checkpoint.config if isinstance(side, CheckpointSide) else None


def open_side(path: Path) -> Side:
    """One alone, under the names that it has."""
    return _open(path, bool(gguf_models(path)), mixed=False)


def _open(path: Path, gguf: bool, mixed: bool) -> Side:
    if not gguf:
        return CheckpointSide(Artifact.open(path))
    if mixed:
        source = open_source(path)
        return RenamedSide(source, hf_model(source, "float32"))
    models = gguf_models(path)
    if len(models) > 1:
        open_source(path)  # says that there are several
    return GgufSide(GgufFile.open(models[0]))
