"""What `qtool diff` compares, seen as metadata and tensors under names; here a checkpoint.

A side gives the bytes of a tensor in pieces and its values by rows, so that one matrix of codes is
the most that is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.expert_stack import ExpertStack
from qtool.dequantize import dequantize
from qtool.errors import QtoolError, UnsupportedError
from qtool.formats import safetensors_file as st
from qtool.messages.printable import sayable
from qtool.record import without_layers
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


@contextmanager
def told_as(label: str) -> Iterator[None]:
    """Errors say which side is meant: A or B."""
    try:
        yield
    except QtoolError as error:
        raise type(error)(f"{label}: {error}") from error


def rows_of(shape: tuple[int, ...]) -> int:
    """How many rows a tensor has."""
    return prod(shape[:-1])


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested objects as keys joined by dots."""
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, sayable(value)


@dataclass(frozen=True)
class CheckpointSide:
    """See Side."""

    artifact: Artifact
    inside: bool = False  # its decoder is named as it would be alone
    padded: bool = False  # to the widths of the other
    _read: dict[str, GroupQuant] = field(default_factory=dict)  # the last one
    _stacks: dict[str, ExpertStack] = field(default_factory=dict)  # likewise

    @property
    def path(self) -> Path:
        return self.artifact.checkpoint.path

    @property
    def format(self) -> str:
        return self.artifact.found.label + (", padded like the other" if self.padded else "")

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        checkpoint = self.artifact.checkpoint
        found = dict(flat(checkpoint.config))
        found |= {f"__metadata__.{key}": value for key, value in checkpoint.metadata.items()}
        if self.artifact.provenance is not None:
            found |= dict(flat(without_layers(self.artifact.provenance), "qtool.json"))
        if self.artifact.unreadable:
            found["qtool.json"] = f"cannot be read ({self.artifact.unreadable})"
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
            info = checkpoint.tensors[one]

            def read(first: int, count: int, name: str = one) -> NDArray[np.uint8]:
                return checkpoint.stretch(name, first, first + count)

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
        if entry.stacked:
            if name not in self._stacks:
                self._stacks.clear()
                self._stacks[name] = ExpertStack(self.artifact, name)
            return self._stacks[name].rows(first, last)
        if entry.scheme is not None:
            raise UnsupportedError(f"{name}: {entry.scheme} is not decoded by this version")
        info = checkpoint.tensors[entry.stored[0]]
        width = info.shape[-1] if info.shape else 1
        size = info.nbytes // max(1, rows_of(info.shape))
        raw = checkpoint.stretch(info.name, first * size, last * size)
        if info.dtype in st.FLOAT_DTYPES and info.dtype != "F64":
            return st.to_float32(raw, info.dtype, (last - first, width))
        return st.as_array(raw, info.dtype, (last - first, width)).astype(np.float64)


def part_of(quant: GroupQuant, first: int, last: int) -> GroupQuant:
    """Some rows of a matrix."""
    return quant.rows(slice(first, last))


def _digest(path: Path) -> str:
    """The first of a file's digest; its length where it is large."""
    size = path.stat().st_size
    if size > _MAX_DIGESTED:
        return f"{size} bytes"
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
