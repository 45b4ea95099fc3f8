"""The safetensors container: a length, a JSON header, then the tensors' bytes.

    file   := length:u64le  header:utf8[length]  data
    header := { name: {"dtype": D, "shape": [n, ...], "data_offsets": [begin, end]}, ...,
                "__metadata__": {str: str} }          then any number of spaces

Offsets count from the start of `data`, cover it without gap or overlap, and end - begin is the
size of dtype times the product of shape. Nothing read here is believed before it was checked
against the size of the file. Reading is by ranges into fresh buffers: the touched pages of a
memory map would count as resident memory.

Source: the format section of the safetensors documentation (huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qtool.errors import FormatError, SourceError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


# Bits of one element; F4 and F6 pack several elements into a byte.
DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "C64": 64,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
DTYPE_BYTES: dict[str, int] = {name: bits // 8 for name, bits in DTYPE_BITS.items() if bits >= 8}
# BF16 and the 8-bit floats have no numpy dtype: they are read as the integers that hold them.
NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "C64": "<c8",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
FLOAT_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_JSON_BYTES = 100_000_000  # for the JSON files that lie beside the weights
MAX_DIMENSIONS = 64
_METADATA = "__metadata__"


def byte_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; dtype must be a key of DTYPE_BITS."""
    return (prod(shape) * DTYPE_BITS[dtype] + 7) // 8


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be stored: what it is called and how large it is, not where it goes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return byte_size(self.dtype, self.shape)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file; start and end are byte positions in that file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused when a key comes twice: readers would disagree on which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} comes twice")
            seen.add(key)
    return found


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes; FormatError names `where` for anything else."""
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise FormatError(f"{where}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(found).__name__}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that lies beside the weights."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise FormatError(f"{path}: {size} bytes of JSON, at most {MAX_JSON_BYTES} are read")
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_json(data, str(path))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(where: str, name: str, entry: object, data_start: int, size: int) -> TensorInfo:
    """One tensor of the header, with every number checked."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(f"{where}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise FormatError(
            f"{where}: tensor {name!r} has the shape {shape!r}; expected a list of counts"
        )
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"{where}: tensor {name!r} has {len(shape)} dimensions")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise FormatError(
            f"{where}: tensor {name!r} has data_offsets {offsets!r}; expected [begin, end]"
        )
    begin, end = offsets
    if begin > end:
        raise FormatError(f"{where}: tensor {name!r} ends at {end}, before it begins at {begin}")
    if data_start + end > size:
        raise FormatError(
            f"{where}: tensor {name!r} ends at byte {data_start + end} of a file of {size} bytes; "
            "the file is truncated: fetch it again"
        )
    expected = byte_size(dtype, shape)
    if expected != end - begin:
        raise FormatError(
            f"{where}: tensor {name!r} is {dtype} {shape} and needs {expected} bytes, "
            f"but its data_offsets hold {end - begin}"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _read_into(path: Path, start: int, view: memoryview) -> None:
    """Fill `view` with the bytes from `start`."""
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while done < len(view):
                got = file.readinto(view[done:])
                if not got:
                    raise FormatError(
                        f"{path}: ends {len(view) - done} bytes early; "
                        "the file is truncated: fetch it again"
                    )
                done += got
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None


def _read_bytes(path: Path, start: int, count: int) -> bytes:
    buffer = bytearray(count)
    _read_into(path, start, memoryview(buffer))
    return bytes(buffer)


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Every tensor of a file in the order of the header, and its metadata. Reads no tensor."""
    where = str(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise SourceError(f"{where}: cannot be read ({error.strerror})") from None
    if size < 8:
        raise FormatError(
            f"{where}: {size} bytes are too few for a safetensors file; fetch it again"
        )
    length = int.from_bytes(_read_bytes(path, 0, 8), "little")
    if length > size - 8:
        raise FormatError(
            f"{where}: the header is said to be {length} bytes long, the file has {size}; "
            "it is truncated or no safetensors file"
        )
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"{where}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    raw = _read_bytes(path, 8, length)
    if raw[:1] != b"{":
        raise FormatError(f"{where}: the header does not begin with '{{': no safetensors file")
    header = parse_json(raw, f"{where}: header")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{where}: {_METADATA} must map strings to strings")
    data_start = 8 + length
    tensors = {n: _parse_entry(where, n, e, data_start, size) for n, e in header.items()}
    position = data_start
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if info.start != position:
            problem = "overlaps the tensor before it" if info.start < position else "leaves a gap"
            raise FormatError(
                f"{where}: tensor {info.name!r} begins at byte {info.start} and {problem}, "
                f"which ends at {position}"
            )
        position = info.end
    if position != size:
        raise FormatError(
            f"{where}: {size - position} bytes follow the last tensor and belong to none"
        )
    return tensors, metadata


def read_range(path: Path, info: TensorInfo) -> NDArray[np.uint8]:
    """The bytes of one tensor, uint8 [nbytes], in a fresh buffer."""
    buffer = np.empty(info.nbytes, np.uint8)
    _read_into(path, info.start, buffer.data)
    return buffer


def as_array(raw: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Raw bytes as an array of their numpy dtype, without a copy; BF16 comes as uint16."""
    if dtype not in NUMPY_DTYPES:
        raise UnsupportedError(f"{dtype} tensors cannot be read as numbers by this version")
    return raw.view(NUMPY_DTYPES[dtype]).reshape(tuple(shape))


def to_float32(raw: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[np.float32]:
    """Raw bytes of a float tensor as float32; exact for F16, BF16 and F32."""
    if dtype not in FLOAT_DTYPES:
        raise UnsupportedError(
            f"expected weights in F32, F16 or BF16, found {dtype}; this version reads no other"
        )
    array = as_array(raw, dtype, shape)
    if dtype == "BF16":
        wide = array.astype(np.uint32)
        np.left_shift(wide, np.uint32(16), out=wide)
        return wide.view(np.float32)
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def from_float32(array: NDArray[np.float32], dtype: str, name: str) -> NDArray[np.uint8]:
    """Raw bytes of `array` in dtype, rounded to nearest even; uint8 [nbytes].

    FormatError, naming the tensor, where a finite value is too large for dtype.
    """
    source = np.ascontiguousarray(array, dtype=np.float32)
    stored: NDArray[Any]
    if dtype == "F32":
        return source.reshape(-1).view(np.uint8)
    if dtype == "F16":
        with np.errstate(over="ignore", under="ignore"):
            stored = source.astype("<f2")
        infinite = np.isinf(stored)
    elif dtype == "BF16":
        bits = source.view(np.uint32)
        stored = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
        nan = np.isnan(source)
        if nan.any():  # the rounding would carry a NaN's payload into its exponent
            stored[nan] = 0x7FC0
        infinite = (stored & 0x7FFF) == 0x7F80
    else:
        raise FormatError(f"{name}: float weights cannot be written as {dtype}")
    if infinite.any() and (infinite & np.isfinite(source)).any():
        index = tuple(int(i) for i in np.argwhere(infinite & np.isfinite(source))[0])
        raise FormatError(
            f"{name}: the value {float(source[index]):.6g} at {list(index)} is too large for "
            f"{dtype}; write this tensor as F32 or BF16"
        )
    return stored.reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class FileLayout:
    """One file to write: its tensors with their final byte ranges, and its header."""

    name: str
    tensors: Mapping[str, TensorInfo]
    header: bytes  # with its length and padding
    size: int  # of the whole file


@dataclass(frozen=True)
class Layout:
    """All files to write; `index` is the content of the index file where there are several."""

    files: tuple[FileLayout, ...]
    index: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size for file in self.files)

    def place(self, name: str) -> tuple[FileLayout, TensorInfo]:
        """Where a tensor goes."""
        for file in self.files:
            if name in file.tensors:
                return file, file.tensors[name]
        raise KeyError(name)


INDEX_NAME = "model.safetensors.index.json"


def lay_out(
    name: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """The layout of one file holding `specs` in the order given."""
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    ordered = tuple(specs)
    for spec in ordered:
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
    for spec in ordered:
        begin, end = header[spec.name]["data_offsets"]
        tensors[spec.name] = TensorInfo(
            spec.name, spec.dtype, spec.shape, start + begin, start + end
        )
    return FileLayout(name, tensors, len(text).to_bytes(8, "little") + text, start + position)


def plan_shards(
    specs: Sequence[TensorSpec],
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> Layout:
    """Divide tensors, in order, into files of at most `max_shard_bytes` of data each.

    A tensor larger than that gets a file of its own. Within a file wide dtypes come first, so
    that every tensor is aligned to its own element.
    """
    if max_shard_bytes <= 0:
        raise FormatError(f"a shard of {max_shard_bytes} bytes holds nothing")
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    written = {"format": "pt"} if metadata is None else metadata
    files = tuple(
        lay_out(name, sorted(shard, key=lambda s: -DTYPE_BITS[s.dtype]), written)
        for name, shard in zip(names, shards, strict=True)
    )
    everything = [name for file in files for name in file.tensors]
    if len(set(everything)) != len(everything):
        twice = next(name for name in everything if everything.count(name) > 1)
        raise FormatError(f"two tensors are called {twice!r}")
    if len(files) == 1:
        return Layout(files)
    weight_map = {name: file.name for file in files for name in file.tensors}
    total = sum(spec.nbytes for spec in specs)
    return Layout(
        files,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_failed(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnsupportedError(f"{path}: the disk is full; free some space or choose another -o")
    return UnsupportedError(f"{path}: cannot be written ({error.strerror})")


@dataclass
class StreamWriter:
    """Writes a layout into an existing folder: headers first, then tensors in any order.

    `checksums` holds the CRC-32 of every tensor added, for reading back.
    """

    folder: Path
    layout: Layout
    checksums: dict[str, int] = field(default_factory=dict)
    _files: dict[str, int] = field(default_factory=dict, repr=False)
    _places: dict[str, tuple[str, TensorInfo]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if self.layout.size > free:
            raise UnsupportedError(
                f"{self.folder}: the disk is full: {self.layout.size} bytes are needed, "
                f"{free} are free; choose another -o"
            )
        for file in self.layout.files:
            path = self.folder / file.name
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                self._files[file.name] = descriptor
                os.truncate(descriptor, file.size)
            except OSError as error:
                self.abandon()
                raise _write_failed(path, error) from None
            for name, info in file.tensors.items():
                self._places[name] = (file.name, info)
            self._write(file.name, 0, memoryview(file.header))

    def _write(self, file: str, position: int, data: memoryview) -> None:
        descriptor = self._files[file]
        try:
            while data:
                done = os.pwrite(descriptor, data, position)
                data, position = data[done:], position + done
        except OSError as error:
            # The files stay open: other threads may be writing, and a closed number is reused.
            raise _write_failed(self.folder / file, error) from None

    def add(self, name: str, data: bytes | NDArray[Any]) -> None:
        """Store one tensor: raw bytes, a uint8 array of them, or an array of the tensor's shape."""
        if name not in self._places:
            raise FormatError(f"{name}: not in the layout of {self.folder}")
        if name in self.checksums:
            raise FormatError(f"{name}: written twice")
        file, info = self._places[name]
        array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        raw = array.ndim == 1 and array.dtype == np.uint8 and array.size == info.nbytes
        if not raw and (
            array.shape != info.shape or array.dtype != np.dtype(NUMPY_DTYPES.get(info.dtype, "V"))
        ):
            raise FormatError(
                f"{name}: the layout has {info.dtype} {list(info.shape)}, "
                f"given {array.dtype} {list(array.shape)}"
            )
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._write(file, info.start, view)
        self.checksums[name] = zlib.crc32(view)

    def close(self) -> None:
        """Make everything durable and write the index; FormatError if a tensor is missing."""
        missing = [name for name in self._places if name not in self.checksums]
        if missing:
            self.abandon()
            raise FormatError(f"{missing[0]}: never written ({len(missing)} tensors missing)")
        try:
            for descriptor in self._files.values():
                os.fsync(descriptor)
                if hasattr(os, "posix_fadvise"):  # so that reading back reads the disk
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if self.layout.index is not None:
                text = json.dumps(self.layout.index, indent=2) + "\n"
                (self.folder / INDEX_NAME).write_text(text, encoding="utf-8")
        except OSError as error:
            raise _write_failed(self.folder, error) from None
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files without the checks; what was written stays for the caller to remove."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        if kind is None:
            self.close()
        else:
            self.abandon()
        return False


def parse_size(text: str) -> int:
    """Bytes from "5GB", "500MB", "2GiB" or a plain number; FormatError for anything else."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found:
        raise FormatError(f"{text!r} is no size; write it like 5GB or 500MiB")
    number, prefix, binary = found.groups()
    power = " kmgt".index(prefix) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)
