"""The two things that `qtool diff` compares, each as metadata and tensors under names.

    CheckpointSide   a folder or a safetensors file; names as in the unquantized model
    GgufSide         a GGUF file; llama.cpp's names
    RenamedSide      a GGUF file beside a checkpoint: the checkpoint's names, rows and config

A side gives the bytes of a tensor in pieces and its values by rows, so that one matrix of codes is
the most that is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.artifact import Artifact
from qtool.dequantize import dequantize
from qtool.errors import UnsupportedError
from qtool.formats import safetensors_file as st
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind
from qtool.gguf.inspect import gguf_models, number, plain
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf import HfModel, HfTensor, put_back
from qtool.gguf_types import BY_NAME
from qtool.scheme import GroupQuant, Scheme

_MAX_DIGESTED = 64_000_000  # bytes of a file beside the weights


@dataclass(frozen=True)
class Item:
    """A tensor of one side."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str | None  # None is dense
    nbytes: int

    def json(self) -> dict[str, Any]:
        """For --json."""
        found = {"shape": list(self.shape), "dtype": self.dtype, "scheme": self.scheme}
        return found | {"bytes": self.nbytes}


@dataclass(frozen=True)
class Stored:
    """Bytes of a tensor as they lie in a file."""

    label: str  # what must be equal for the bytes to mean the same
    nbytes: int
    read: Callable[[int, int], NDArray[np.uint8]]  # (offset, count)


class Side(Protocol):
    """See the module."""

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]:
        """Keys and values that JSON can say, nested ones joined by dots."""
        ...

    @property
    def items(self) -> Mapping[str, Item]: ...

    def stored(self, name: str) -> list[Stored]:
        """The bytes of a tensor."""
        ...

    def quant(self, name: str) -> GroupQuant | None:
        """Its codes, where it has codes of single weights."""
        ...

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Values [last - first, in]; rows are those of all leading axes counted through.
        UnsupportedError where this version cannot read them."""
        ...


def rows_of(shape: tuple[int, ...]) -> int:
    """How many rows a tensor has."""
    return prod(shape[:-1])


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested objects as keys joined by dots."""
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, _sayable(value)


def _sayable(value: Any) -> Any:
    """A value of JSON; infinities and NaN, which Python reads in it, as words."""
    if isinstance(value, list):
        return [_sayable(one) for one in value]
    if isinstance(value, dict):
        return {key: _sayable(one) for key, one in value.items()}
    return number(value)


@dataclass(frozen=True)
class CheckpointSide:
    """See Side."""

    artifact: Artifact
    _read: dict[str, GroupQuant] = field(default_factory=dict)  # the last one

    @property
    def path(self) -> Path:
        return self.artifact.checkpoint.path

    @property
    def format(self) -> str:
        found = self.artifact.found
        return f"{found.format} {found.layout}".strip()

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        checkpoint = self.artifact.checkpoint
        found = dict(flat(checkpoint.config))
        found |= {f"__metadata__.{key}": value for key, value in checkpoint.metadata.items()}
        found |= dict(flat(self.artifact.provenance or {}, "qtool.json"))
        if checkpoint.path.is_dir():
            for file in checkpoint.side_files:
                found[f"file {file.as_posix()}"] = _digest(checkpoint.folder / file)
        return found

    @cached_property
    def items(self) -> Mapping[str, Item]:
        return {
            name: Item(
                name, e.shape, e.dtype, None if e.scheme is None else str(e.scheme), e.nbytes
            )
            for name, e in self.artifact.entries.items()
        }

    def stored(self, name: str) -> list[Stored]:
        checkpoint, scheme = self.artifact.checkpoint, self.items[name].scheme
        how = "" if scheme is None else f" {self.format} {scheme}"
        found = []
        for one in sorted(self.artifact.entries[name].stored):
            info, file = checkpoint.tensors[one], checkpoint.file_of(one)

            def read(
                first: int, count: int, info: st.TensorInfo = info, file: Path = file
            ) -> NDArray[np.uint8]:
                start = info.start + first
                return st.read_range(file, replace(info, start=start, end=start + count))

            last = one.rpartition(".")[2]
            found.append(Stored(f"{last} {info.dtype} {info.shape}{how}", info.nbytes, read))
        return found

    def quant(self, name: str) -> GroupQuant | None:
        entry = self.artifact.entries[name]
        if not isinstance(entry.scheme, Scheme):
            return None
        if name not in self._read:
            self._read.clear()
            value = self.artifact.read(name)
            assert isinstance(value, GroupQuant)
            self._read[name] = value
        return self._read[name]

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        quant = self.quant(name)
        if quant is not None:
            return dequantize(part_of(quant, first, last))
        entry, checkpoint = self.artifact.entries[name], self.artifact.checkpoint
        if entry.scheme is not None:
            raise UnsupportedError(f"{name}: {entry.scheme} is not decoded by this version")
        info = checkpoint.tensors[entry.stored[0]]
        width = info.shape[-1] if info.shape else 1
        size = info.nbytes // max(1, rows_of(info.shape))
        start = info.start + first * size
        wanted = replace(info, start=start, end=start + (last - first) * size)
        raw = st.read_range(checkpoint.file_of(info.name), wanted)
        if info.dtype in st.FLOAT_DTYPES and info.dtype != "F64":
            return st.to_float32(raw, info.dtype, (last - first, width))
        return st.as_array(raw, info.dtype, (last - first, width)).astype(np.float64)


def part_of(quant: GroupQuant, first: int, last: int) -> GroupQuant:
    """Some rows of a matrix."""
    scheme = quant.scheme
    rows = np.arange(first, last)
    if scheme.rows != 1:
        rows //= scheme.rows if scheme.rows > 0 else quant.shape[0]
    return replace(
        quant,
        scheme=replace(scheme, rows=1),
        codes=quant.codes[first:last],
        scale=quant.scale[rows],
        zero=quant.zero[rows],
    )


def _digest(path: Path) -> str:
    """The first of a file's digest; its length where it is large."""
    size = path.stat().st_size
    if size > _MAX_DIGESTED:
        return f"{size} bytes"
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


@dataclass(frozen=True)
class GgufSide:
    """See Side."""

    file: GgufFile

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
        }

    def stored(self, name: str) -> list[Stored]:
        info = self.file.tensors[name]

        def read(first: int, count: int) -> NDArray[np.uint8]:
            raw = np.empty(count, np.uint8)
            self.file.read_into(name, first, raw.data)
            return raw

        return [Stored(f"{info.type.name} {info.shape}", info.nbytes, read)]

    def quant(self, name: str) -> GroupQuant | None:
        return None

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        from qtool.gguf.statistics import numbers

        info = self.file.tensors[name]
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
            shape, type_ = tensor.specs[place].shape, tensor.source.type
            nbytes = tensor.source.nbytes // len(tensor.specs)
            found[name] = Item(name, shape, type_.name, _scheme(type_.name), nbytes)
        return found

    def stored(self, name: str) -> list[Stored]:
        return [Stored("rows of another order", 0, lambda *_: np.empty(0, np.uint8))]

    def quant(self, name: str) -> GroupQuant | None:
        return None

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        tensor, place = self._places[name]
        if tensor.module.rows is None:
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
    first, second = (_open(path, gguf, mixed) for path, gguf in zip((a, b), kinds, strict=True))
    return first, second


def _open(path: Path, gguf: bool, mixed: bool) -> Side:
    if not gguf:
        return CheckpointSide(Artifact.open(path))
    from qtool.gguf.open import open_source
    from qtool.gguf.to_hf import hf_model

    if mixed:
        source = open_source(path)
        return RenamedSide(source, hf_model(source, "float32"))
    models = gguf_models(path)
    if len(models) > 1:
        open_source(path)  # says that there are several
    return GgufSide(GgufFile.open(models[0]))
