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

import json
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError, SourceError
from qtool.formats.dtypes import DTYPE_BITS, byte_size
from qtool.formats.instead import kind_of, no_weights, why_not

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_JSON_BYTES = 100_000_000  # for the JSON files that lie beside the weights
MAX_JSON_DEPTH = 100  # objects and lists within each other
# What Python makes of JSON may be so many times as large as the text, and so much larger: headers,
# indexes and configs take 4 to 9 times. Of a tokenizer, words and pairs of a few letters take 20
# times when they are written without blanks: 262144 words and 514906 pairs come near to its margin.
MAX_JSON_GROWTH, JSON_MARGIN = 10, 1 << 20
TOKENIZER, TOKENIZER_MARGIN = "tokenizer.json", 1 << 27
MAX_DIMENSIONS = 64
METADATA = "__metadata__"

# A key that comes again takes so much less; looked for are those that are among the first few.
_KEY_AGAIN, _KEYS_KNOWN = 100, 1000
_KEY = re.compile(rb'"([^"\\]{1,80})"\s*:')
_HALF_PAIR = re.compile(rb"\\u[dD][89abcdefABCDEF]")

Read = Callable[[int, int], bytes]  # (offset, count) -> exactly `count` bytes of a file


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


@dataclass(frozen=True, slots=True)
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


def _json_bytes(data: bytes) -> int:
    """At most so many bytes of Python objects are made of a JSON text; empty lists alone would take
    twenty times its own."""
    count = data.count
    commas, quotes = count(b","), count(b'"')
    # What stands between commas and is no text, with the room that its list is moved to.
    numbers = 40 * max(0, commas - quotes // 2)
    objects = 184 * count(b"{") - 120 * count(b"{}") + 140 * count(b":")
    lists = 88 * count(b"[") - 32 * count(b"[]") + 8 * commas
    return objects + lists + numbers + 30 * quotes + len(data) * (1 if data.isascii() else 4)


def _repeated_keys(data: bytes) -> int:
    """How many keys stood in the text before: Python makes one text of each."""
    seen: set[bytes] = set()
    again = 0
    for found in _KEY.finditer(data):
        if found[1] in seen:
            again += 1
        elif len(seen) < _KEYS_KNOWN:
            seen.add(found[1])
    return again


def _has_half_pair(container: dict[str, Any] | list[Any]) -> bool:
    """Whether a text directly in it is one that nothing can store."""
    texts = chain(container, container.values() if isinstance(container, dict) else ())
    try:
        for one in texts:
            if isinstance(one, str):
                one.encode()
    except UnicodeEncodeError:
        return True
    return False


def parse_json(data: bytes, where: str, margin: int = JSON_MARGIN) -> dict[str, Any]:
    """A JSON object from bytes; FormatError names `where` for anything else.

    margin: how much more than so many times the text's bytes it may take.
    """
    most, needed = len(data) * MAX_JSON_GROWTH + margin, _json_bytes(data)
    if needed > most and needed - _KEY_AGAIN * data.count(b":") <= most:
        needed -= _KEY_AGAIN * _repeated_keys(data)
    if needed > most:
        raise FormatError(
            f"{where}: {len(data)} bytes of JSON so dense that they would take {needed} bytes of "
            "memory; no model's file is like this"
        )
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise FormatError(f"{where}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON ({why_not(data, error)})") from None
    if not isinstance(found, dict):
        raise FormatError(f"{where}: expected a JSON object, found {kind_of(found)}")
    halves = _HALF_PAIR.search(data) is not None  # maybe: such an escape may have its other half
    # Whatever walks through it later calls itself once for each level.
    level: list[Any] = [found]
    depth = 0
    while level:
        if (depth := depth + 1) > MAX_JSON_DEPTH:
            raise FormatError(f"{where}: the JSON is nested more than {MAX_JSON_DEPTH} deep")
        if halves and any(map(_has_half_pair, level)):
            raise FormatError(
                f"{where}: holds half of a surrogate pair, which is no text; fetch the file again"
            )
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that lies beside the weights."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            raise SourceError(f"{path}: not a file; expected one of JSON")
        if (size := found.st_size) > MAX_JSON_BYTES:
            raise FormatError(f"{path}: {size} bytes of JSON, at most {MAX_JSON_BYTES} are read")
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_json(data, str(path), TOKENIZER_MARGIN if path.name == TOKENIZER else JSON_MARGIN)


def _is_count(value: object) -> bool:
    """What 64 bits can count: of larger numbers the products could not even be printed."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


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
    try:
        size = path.stat().st_size
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_header(partial(_read_bytes, path), size, str(path))


def parse_header(
    read: Read, size: int, where: str, most: int = MAX_HEADER_BYTES
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The same of a file of `size` bytes, wherever it lies: it is asked for the first 8 bytes and
    then for a header of at most `most`, and for nothing else."""
    if size < 8:
        raise FormatError(
            f"{where}: {size} bytes are too few for a safetensors file; fetch it again"
        )
    head = read(0, 8)
    if head[:4] == b"GGUF":
        raise FormatError(f"{where}: a GGUF file, whatever its name is, where safetensors belong")
    length = int.from_bytes(head, "little")
    if length > size - 8 and (other := no_weights(head)) is not None:
        raise FormatError(f"{where}: {other}")
    if length > size - 8:
        raise FormatError(
            f"{where}: no safetensors file, or a truncated one: its first bytes say that the "
            f"header is {length} bytes long, and the file has {size}; fetch it again"
        )
    if length > most:
        raise FormatError(f"{where}: a header of {length} bytes; at most {most} are read")
    raw = read(8, length)
    if raw[:1] != b"{":
        raise FormatError(f"{where}: the header does not begin with '{{': no safetensors file")
    header = parse_json(raw, f"{where}: header")
    metadata = header.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{where}: {METADATA} must map strings to strings")
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
