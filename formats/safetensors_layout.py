"""Which bytes of which file every tensor is to have, before the first is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtool.errors import FormatError
from qtool.formats.dtypes import DTYPE_BITS
from qtool.formats.safetensors_header import MAX_HEADER_BYTES, METADATA, TensorInfo, TensorSpec


@dataclass(frozen=True)
class FileLayout:
    """One file to write: its tensors with their final byte ranges, and its header."""

    name: str
    tensors: Mapping[str, TensorInfo]  # as they are written: of a stack each part
    header: bytes  # with its length and padding
    size: int  # of the whole file
    stored: tuple[str, ...]  # names in the header


@dataclass(frozen=True)
class Layout:
    """All files to write; `index` is the content of the index file where there are several."""

    files: tuple[FileLayout, ...]
    index: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size for file in self.files)


INDEX_NAME = "model.safetensors.index.json"
_TORCH = {"format": "pt"}  # what readers of transformers look for in the metadata


# Of a tensor's name: the name of the stack that it is stored in, and its place there.
StackOf = Callable[[str], tuple[str, int] | None]


@dataclass(frozen=True)
class _Unit:
    """A tensor of a file, and what it is written from: itself, or the parts of a stack in order."""

    spec: TensorSpec
    parts: tuple[TensorSpec, ...]


def _units(specs: Iterable[TensorSpec], stack_of: StackOf | None) -> list[_Unit]:
    """FormatError where the parts of a stack are not alike."""
    units: dict[str, dict[int, TensorSpec]] = {}
    for spec in specs:
        name, place = (stack_of(spec.name) if stack_of else None) or (spec.name, -1)
        if place in units.setdefault(name, {}):
            raise FormatError(f"two tensors are called {spec.name!r}")
        units[name][place] = spec
    found = []
    for name, parts in units.items():
        if -1 in parts:
            found.append(_Unit(parts[-1], (parts[-1],)))
            continue
        first = parts.get(0)
        if first is None or {*parts} != {*range(len(parts))}:
            raise FormatError(f"{name}: experts {sorted(parts)[:8]} are no whole stack")
        for spec in parts.values():
            if (spec.dtype, spec.shape) != (first.dtype, first.shape):
                raise FormatError(
                    f"{spec.name} is {spec.dtype} {list(spec.shape)}, {first.name} {first.dtype} "
                    f"{list(first.shape)}: experts that are stored in one tensor have one scheme"
                )
        whole = TensorSpec(name, first.dtype, (len(parts), *first.shape))
        found.append(_Unit(whole, tuple(parts[place] for place in range(len(parts)))))
    return found


def lay_out(
    name: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """The layout of one file holding `specs` in the order given."""
    return _lay_out(name, _units(specs, None), metadata)


def _lay_out(
    name: str, units: Sequence[_Unit], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    position = 0
    for unit in units:
        spec = unit.spec
        if spec.name in header:
            raise FormatError(f"{name}: two tensors are called {spec.name!r}")
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that data begins aligned
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            f"{name}: a header of {len(text)} bytes; readers take no more than "
            f"{MAX_HEADER_BYTES}: use smaller shards"
        )
    start = 8 + len(text)
    tensors = {}
    for unit in units:
        begin = start + header[unit.spec.name]["data_offsets"][0]
        for part in unit.parts:
            end = begin + part.nbytes
            tensors[part.name] = TensorInfo(part.name, part.dtype, part.shape, begin, end)
            begin = end
    stored = tuple(unit.spec.name for unit in units)
    whole = len(text).to_bytes(8, "little") + text
    return FileLayout(name, tensors, whole, start + position, stored)


def plan_shards(
    specs: Sequence[TensorSpec],
    max_shard_bytes: int = 5_000_000_000,
    stack_of: StackOf | None = None,
) -> Layout:
    """Divide tensors, in order, into files of at most `max_shard_bytes` of data each.

    A tensor larger than that gets a file of its own. Within a file wide dtypes come first, so
    that every tensor is aligned to its own element. stack_of: what is stored in one
    tensor together.
    """
    if max_shard_bytes <= 0:
        raise FormatError(f"a shard of {max_shard_bytes} bytes holds nothing")
    shards: list[list[_Unit]] = [[]]
    filled = 0
    for unit in _units(specs, stack_of):
        if shards[-1] and filled + unit.spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.spec.nbytes
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    files = tuple(
        _lay_out(name, sorted(shard, key=lambda unit: -DTYPE_BITS[unit.spec.dtype]), _TORCH)
        for name, shard in zip(names, shards, strict=True)
    )
    everything = [name for file in files for name in file.stored]
    if len(set(everything)) != len(everything):
        twice = next(name for name in everything if everything.count(name) > 1)
        raise FormatError(f"two tensors are called {twice!r}")
    if len(files) == 1:
        return Layout(files)
    weight_map = {name: file.name for file in files for name in file.stored}
    total = sum(spec.nbytes for spec in specs)
    return Layout(
        files,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
