"""The header of a GGUF file, versions 2 and 3, little endian.

    file   := "GGUF"  version:u32  tensors:u64  keys:u64  entry[keys]  info[tensors]
              padding to `general.alignment` (32)  data
    entry  := key:string  kind:u32  value              array := kind:u32  count:u64  element[count]
    info   := name:string  dimensions:u32  ne:u64[dimensions]  type:u32  offset:u64
    string := length:u64  utf8[length]

Offsets count from the start of `data` and are multiples of the alignment; ne[0] is the length of
a row. Nothing read here is believed before it was checked against the size of the file, and the
limits below and in `gguf_cursor` bound the time and the memory that a file can cost: 32 MB of
header are read at most, of which only keys, names and single strings become objects. A file is read
in order, through a function (offset, count) -> bytes, and less than a megabyte beyond the header.
Strings are UTF-8; bytes that are not come through `surrogateescape` unchanged. An array of arrays,
allowed by the specification, is refused as llama.cpp does.

Source: the GGUF specification (ggml, docs/gguf.md).
"""

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from qtool.errors import SourceError
from qtool.formats.gguf_arrays import StoredArray
from qtool.formats.gguf_cursor import Cursor, Read
from qtool.formats.gguf_values import STRUCT, Kind, Value
from qtool.formats.instead import no_weights
from qtool.gguf_types import TENSOR_TYPES, BlockType

MAX_KEYS = 4_096
MAX_TENSORS = 16_384
MAX_KEY_LENGTH = 65_535  # of the specification
MAX_NAME_LENGTH = 1_024  # ggml's own is 63, some programs built on it allow more
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 65_536  # whoever writes the model again pads every tensor to it

_OLD_MAGICS = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT", b"algg": "GGLA"}
# Numbers that once were types of ggml, and what to say of them.
_REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
_UNSTORED = {9: "Q8_1", 15: "Q8_K"}  # of activations, inside ggml
_NO_BOOL = re.compile(rb"[^\0\1]")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file: rows of blocks, one row after another."""

    name: str
    shape: tuple[int, ...]  # as numpy has it: the row length last
    type: BlockType
    start: int  # byte position in `file`
    nbytes: int
    file: Path

    @property
    def in_features(self) -> int:
        """Weights in a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows, those of all leading axes counted through."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.type.row_bytes(self.in_features)

    @property
    def size(self) -> int:
        """Number of weights."""
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What one file says of itself."""

    version: int
    alignment: int
    metadata: Mapping[str, Value]  # in file order
    tensors: tuple[TensorInfo, ...]  # in file order
    data_start: int
    file_bytes: int


def parse_header(read: Read, size: int, path: Path) -> Header:
    """The header of a file of `size` bytes, checked; FormatError says what is wrong with it."""
    return _parse(Cursor(read, size, str(path)), path)


def read_header(descriptor: int, path: Path) -> Header:
    """The same of an open file."""
    try:
        size = os.fstat(descriptor).st_size
        return parse_header(lambda offset, count: os.pread(descriptor, count, offset), size, path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None


def _parse(cursor: Cursor, path: Path) -> Header:
    version = _version(cursor)
    tensor_count, key_count = cursor.u64("the number of tensors"), cursor.u64("the number of keys")
    for count, what, limit, least in (
        (tensor_count, "tensors", MAX_TENSORS, 32),
        (key_count, "metadata keys", MAX_KEYS, 13),
    ):
        if count * least > cursor.size or count > limit:
            raise cursor.error(
                f"{count} {what} in a file of {cursor.size} bytes; at most {limit} are read, "
                "so the file is truncated, damaged or no model"
            )
    metadata: dict[str, Value] = {}
    for number in range(key_count):
        key = cursor.label(f"metadata key {number}", MAX_KEY_LENGTH)
        if key in metadata:
            raise cursor.error(f"the metadata key {key!r} comes twice")
        metadata[key] = _value(cursor, key)
    alignment = _alignment(cursor, metadata)
    infos: dict[str, tuple[tuple[int, ...], BlockType, int, int]] = {}
    for number in range(tensor_count):
        name = cursor.label(f"the name of tensor {number}", MAX_NAME_LENGTH)
        if name in infos:
            raise cursor.error(f"the tensor {name!r} comes twice")
        infos[name] = _tensor(cursor, name, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(
        TensorInfo(name, shape, kind, data_start + offset, nbytes, path)
        for name, (shape, kind, offset, nbytes) in infos.items()
    )
    _check_places(cursor, tensors)
    del cursor.data[cursor.position :]
    return Header(version, alignment, metadata, tensors, data_start, cursor.size)


def _version(cursor: Cursor) -> int:
    """2 or 3, after the magic."""
    if not cursor.size:
        raise cursor.error("the file is empty: fetch it again")
    head = bytes(cursor.data[cursor.take(4, "the magic") :][:4])
    if head != b"GGUF":
        if head in _OLD_MAGICS:
            raise cursor.error(
                f"a file of the old {_OLD_MAGICS[head]} family, from before GGUF; "
                "convert the original checkpoint again"
            )
        if head == b"FUGG":
            raise cursor.error(_BIG_ENDIAN)
        if (other := no_weights(bytes(cursor.data[:8]))) is not None:
            raise cursor.error(other)
        raise cursor.error(f"begins with {head!r}, expected b'GGUF': no GGUF file")
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version == 1:
        raise cursor.error(
            "GGUF version 1 of August 2023, whose counts are 32 bits wide; "
            "versions 2 and 3 are read: convert the original checkpoint again"
        )
    if version & 0xFFFF == 0 and version != 0:
        raise cursor.error(_BIG_ENDIAN)
    raise cursor.error(f"GGUF version {version}; versions 2 and 3 are read")


_BIG_ENDIAN = (
    "a big-endian GGUF file; only little-endian ones are read: convert it with "
    "gguf_convert_endian.py of llama.cpp"
)


def _kind(cursor: Cursor, key: str, what: str) -> Kind:
    number = cursor.u32(what)
    if number > max(Kind):
        raise cursor.error(f"the value of {key!r} has the unknown kind {number}")
    return Kind(number)


def _value(cursor: Cursor, key: str) -> Value:
    """One metadata value."""
    what = f"the value of {key!r}"
    kind = _kind(cursor, key, what)
    if kind is Kind.ARRAY:
        return _array(cursor, key, what)
    if kind is Kind.STRING:
        return Value(kind, cursor.string(what).decode("utf-8", "surrogateescape"))
    form = "<" + STRUCT[kind]
    begin = cursor.take(struct.calcsize(form), what)
    if kind is Kind.BOOL and cursor.data[begin] > 1:
        raise cursor.error(f"{what} is the truth value {cursor.data[begin]}, expected 0 or 1")
    return Value(kind, struct.unpack_from(form, cursor.data, begin)[0])


def _array(cursor: Cursor, key: str, what: str) -> Value:
    element = _kind(cursor, key, what)
    if element is Kind.ARRAY:
        raise cursor.error(f"{what} is an array of arrays, which llama.cpp does not read either")
    count = cursor.u64(what)
    width = 8 if element is Kind.STRING else struct.calcsize("<" + STRUCT[element])
    if count * width > cursor.size - cursor.position:
        raise cursor.error(
            f"{what} is said to have {count} elements of {width} bytes or more, and "
            f"{cursor.size - cursor.position} bytes are left of the file; "
            "it is truncated or damaged: fetch it again"
        )
    begin = cursor.position
    if element is Kind.STRING:
        cursor.skip_strings(count, what)
    else:
        cursor.take(count * width, what)
    if element is Kind.BOOL:
        wrong = _NO_BOOL.search(cursor.data, begin, cursor.position)
        if wrong:
            found = cursor.data[wrong.start()]
            raise cursor.error(f"{what} has the truth value {found}, expected 0 or 1")
    stored = StoredArray(cursor.data, begin, cursor.position, element, count)
    return Value(Kind.ARRAY, stored, element)


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    if value.kind is not Kind.UINT32:
        raise cursor.error(f"general.alignment is of the kind {value.kind.name}, expected UINT32")
    alignment = int(value.value)
    if alignment == 0 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment}, expected a power of two")
    if alignment > MAX_ALIGNMENT:
        raise cursor.error(f"general.alignment is {alignment}, expected at most {MAX_ALIGNMENT}")
    return alignment


def _tensor(
    cursor: Cursor, name: str, alignment: int
) -> tuple[tuple[int, ...], BlockType, int, int]:
    """Shape, type, offset and bytes of a tensor behind its name."""
    what = f"tensor {name!r}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
    extents = struct.unpack_from(f"<{dimensions}Q", cursor.data, cursor.take(8 * dimensions, what))
    number, offset = struct.unpack_from("<IQ", cursor.data, cursor.take(12, what))
    shape = tuple(reversed(extents))
    if 0 in shape:
        raise cursor.error(f"{what} has the shape {list(shape)}: no weights at all")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise cursor.error(f"{what} {_unknown_type(number)}")
    if shape[-1] % kind.weights:
        raise cursor.error(
            f"{what} is {kind.name} with rows of {shape[-1]} weights, "
            f"which whole blocks of {kind.weights} do not cover"
        )
    if prod(shape) >= 1 << 63:
        raise cursor.error(f"{what} has the shape {list(shape)}, whose product overflows 63 bits")
    if offset % alignment:
        raise cursor.error(
            f"{what} begins at offset {offset}, which is no multiple of the alignment {alignment}"
        )
    return shape, kind, offset, prod(shape) // kind.weights * kind.nbytes


def _unknown_type(number: int) -> str:
    if number in _REMOVED:
        return (
            f"is of type {number}, {_REMOVED[number]}, which ggml has removed; "
            "take a file that was quantized again"
        )
    if number in _UNSTORED:
        return f"is of type {number}, {_UNSTORED[number]}, which ggml never stores in a file"
    return f"is of the unknown type {number}; the file is damaged or newer than this version"


def _check_places(cursor: Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    """Every tensor inside the file and none on top of another; gaps are allowed."""
    before: TensorInfo | None = None
    for info in sorted(tensors, key=lambda tensor: tensor.start):
        end = info.start + info.nbytes
        if end > cursor.size:
            raise cursor.error(
                f"tensor {info.name!r} ends at byte {end} of a file of {cursor.size} bytes; "
                "the file is truncated: fetch it again"
            )
        if before is not None and info.start < before.start + before.nbytes:
            raise cursor.error(
                f"tensor {info.name!r} begins at byte {info.start}, inside the tensor "
                f"{before.name!r}, which ends at {before.start + before.nbytes}"
            )
        before = info
