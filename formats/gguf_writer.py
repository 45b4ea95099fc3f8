"""Writing GGUF version 3: header and layout are known first, then rows come from any thread.

    file   := "GGUF"  version:u32  tensors:u64  keys:u64  entry[keys]  info[tensors]  padding  data
    entry  := key:string  kind:u32  value              array := kind:u32  count:u64  element[count]
    info   := name:string  dimensions:u32  ne:u64[dimensions]  type:u32  offset:u64
    string := length:u64  utf8[length]
    data   := (tensor padding)[tensors]                 padding with zeros to `general.alignment`

Little endian. Offsets count from the start of `data`; ne is the shape from the last axis to the
first. Rows are written where they belong, in any order; `finish` makes sure that each byte was
written once and none twice. No byte depends on the order.

Source: the GGUF specification (ggml, docs/gguf.md).
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError
from qtool.formats.gguf_arrays import StoredArray
from qtool.formats.gguf_values import STRUCT, Kind, Value
from qtool.gguf_types import BlockType

VERSION = 3
DEFAULT_ALIGNMENT = 32
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME less the null character
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]  # as numpy has it: the row length last
    type: BlockType

    @property
    def rows(self) -> int:
        """Rows, those of all leading axes counted through."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; FormatError unless whole blocks cover it."""
        return self.type.row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the file."""

    header: bytes  # up to and with the padding before the data
    tensors: tuple[TensorSpec, ...]
    starts: tuple[int, ...]  # byte position of each tensor
    size: int  # of the file
    text_at: Mapping[str, tuple[int, int]]  # position and bytes of each single string's value


def lay_out(metadata: Mapping[str, Value], tensors: Sequence[TensorSpec]) -> Layout:
    """The header and the place of every tensor, in the order given."""
    alignment = _alignment(metadata)
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    position = sum(map(len, parts))
    text_at: dict[str, tuple[int, int]] = {}
    for key, value in metadata.items():
        entry = [_string(key), struct.pack("<I", value.kind), _value(key, value)]
        position += sum(map(len, entry))
        if value.kind is Kind.STRING:
            length = len(entry[-1]) - 8
            text_at[key] = (position - length, length)
        parts += entry
    offset = 0
    offsets = []
    seen: set[str] = set()
    for tensor in tensors:
        _check(tensor, seen)
        offsets.append(offset)
        extents = tuple(reversed(tensor.shape))
        parts.append(_string(tensor.name))
        parts.append(
            struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, tensor.type.number, offset)
        )
        offset = _aligned(offset + tensor.nbytes, alignment)
    header = b"".join(parts)
    header += bytes(_aligned(len(header), alignment) - len(header))
    starts = tuple(len(header) + at for at in offsets)
    return Layout(header, tuple(tensors), starts, len(header) + offset, text_at)


def _alignment(metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    number = value.value
    if value.kind is not Kind.UINT32 or number < 1 or number & (number - 1):
        raise FormatError(f"general.alignment is {number!r}; expected a power of two")
    return int(number)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _check(tensor: TensorSpec, seen: set[str]) -> None:
    """FormatError where llama.cpp would not load such a tensor."""
    name = tensor.name
    if name in seen:
        raise FormatError(f"tensor {name!r} comes twice")
    seen.add(name)
    if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise FormatError(
            f"tensor {name!r}: its name has {len(name.encode())} bytes; llama.cpp reads 1 to "
            f"{_MAX_NAME_BYTES}"
        )
    if not 1 <= len(tensor.shape) <= _MAX_DIMENSIONS or 0 in tensor.shape:
        raise FormatError(
            f"tensor {name!r} has shape {list(tensor.shape)}; GGUF has 1 to {_MAX_DIMENSIONS} "
            "axes, none empty"
        )


def _string(text: str) -> bytes:
    # Tokens may be any bytes; those that are no UTF-8 were read as surrogates.
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Value) -> bytes:
    """The bytes behind the kind of a value."""
    if value.kind is Kind.ARRAY:
        if value.element is None or value.element is Kind.ARRAY:
            raise FormatError(f"{key}: an array needs elements of a single kind")
        return struct.pack("<IQ", value.element, len(value.value)) + _elements(key, value)
    return _scalars(key, value.kind, [value.value])


def _elements(key: str, value: Value) -> bytes:
    assert value.element is not None
    if isinstance(value.value, StoredArray) and value.value.kind is value.element:
        return value.value.stored
    return _scalars(key, value.element, value.value)


def _scalars(key: str, kind: Kind, values: Sequence[Any]) -> bytes:
    try:
        if kind is Kind.STRING:
            return b"".join(map(_string, values))
        return struct.pack(f"<{len(values)}{STRUCT[kind]}", *values)
    except (struct.error, AttributeError, UnicodeEncodeError, OverflowError) as error:
        raise FormatError(f"{key}: cannot be stored as {kind.name}: {error}") from None


@contextmanager
def opened(path: Path, size: int) -> Iterator[int]:
    """The descriptor of a file of `size` bytes to write into, or to go on writing into."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.truncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


class GgufWriter:
    """Writes one file through a descriptor; `rows` may be called from any thread."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        """Writes the header and the padding behind each tensor."""
        self.layout = layout
        self._descriptor = descriptor
        self._end_of: dict[int, int] = {}  # of each run that was written, by its start
        self._start_of: dict[int, int] = {}
        self._lock = Lock()
        self._put(0, memoryview(layout.header))
        ends = (*layout.starts, layout.size)[1:]
        for tensor, start, end in zip(layout.tensors, layout.starts, ends, strict=True):
            padding = end - start - tensor.nbytes
            if padding:
                self._put(end - padding, memoryview(bytes(padding)))

    def rows(self, index: int, first: int, data: NDArray[np.uint8]) -> tuple[int, int]:
        """Writes rows [count, bytes of a row] of tensor `index` from row `first` on.

        Returns where: position and bytes.
        """
        tensor = self.layout.tensors[index]
        if data.ndim != 2 or data.shape[1] != tensor.row_bytes or data.dtype != np.uint8:
            raise FormatError(
                f"{tensor.name}: rows come as {data.dtype} {list(data.shape)}, expected uint8 with "
                f"{tensor.row_bytes} bytes a row"
            )
        if not 0 <= first <= first + len(data) <= tensor.rows:
            raise FormatError(
                f"{tensor.name}: rows {first} to {first + len(data)} of {tensor.rows}"
            )
        position = self.layout.starts[index] + first * tensor.row_bytes
        self._put(position, data.reshape(-1).data)
        return position, data.nbytes

    def restored(self, index: int, first: int, last: int) -> None:
        """Takes rows as written: an earlier run did it, and their bytes were looked at."""
        start, row_bytes = self.layout.starts[index], self.layout.tensors[index].row_bytes
        self._note(start + first * row_bytes, start + last * row_bytes)

    def text(self, key: str, text: str) -> None:
        """Puts another text of the same length in the place of a single string's value."""
        position, length = self.layout.text_at[key]
        raw = text.encode()
        if len(raw) != length:
            raise FormatError(f"{key}: {text!r} is not {length} bytes long")
        self._write(position, memoryview(raw))

    def finish(self) -> None:
        """FormatError unless every byte of the file was written, and none twice."""
        position = 0
        for start, end in sorted(self._end_of.items()):
            if start != position:
                what = "twice" if start < position else "never"
                low, high = sorted((start, position))
                raise FormatError(
                    f"bytes {low} to {high} {self._owner(low)} were written {what}; this is an "
                    "error of qtool"
                )
            position = end
        if position != self.layout.size:
            raise FormatError(
                f"bytes {position} to {self.layout.size} {self._owner(position)} were written "
                "never; this is an error of qtool"
            )

    def _owner(self, position: int) -> str:
        found = "of the header"
        for tensor, start in zip(self.layout.tensors, self.layout.starts, strict=True):
            if start <= position:
                found = f"of tensor {tensor.name!r}"
        return found

    def _put(self, position: int, view: memoryview) -> None:
        if not view:
            return
        self._write(position, view)
        self._note(position, position + len(view))

    def _note(self, start: int, end: int) -> None:
        """Bytes start to end are written."""
        with self._lock:
            if start in self._end_of or end in self._start_of:
                raise FormatError(
                    f"bytes {start} to {end} {self._owner(start)} were written twice; this is an "
                    "error of qtool"
                )
            # Runs that touch become one, so that few are kept however many pieces there are.
            start, end = self._start_of.pop(start, start), self._end_of.pop(end, end)
            self._start_of[end], self._end_of[start] = start, end

    def _write(self, position: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], position + done)
