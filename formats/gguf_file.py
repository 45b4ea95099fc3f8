"""GGUF files, whole or split, opened for reading by ranges.

A model may lie in several files, NAME-00001-of-00003.gguf and so on (gguf-split of llama.cpp).
Each has its own header and data; `split.no` (from 0), `split.count` and `split.tensors.count` say
how they belong together, and the first carries the metadata. Any part opens the whole.

Tensors are read with pread into buffers of the caller or fresh ones, from any number of threads:
a descriptor per file stays open until `close`, and touched pages of a memory map would count as
resident memory.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

from qtool.errors import FormatError, SourceError
from qtool.formats.gguf_cursor import MAX_HEADER_BYTES
from qtool.formats.gguf_header import MAX_TENSORS, Header, TensorInfo, read_header
from qtool.formats.gguf_values import Kind, Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

__all__ = ["INTEGERS", "SPLIT_KEYS", "GgufFile", "TensorInfo", "first_parts", "part_names"]

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
MAX_PARTS = 1_000
_PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
INTEGERS = {
    Kind.UINT8, Kind.INT8, Kind.UINT16, Kind.INT16, Kind.UINT32, Kind.INT32, Kind.UINT64,
    Kind.INT64,
}  # fmt: skip


@dataclass(frozen=True)
class GgufFile:
    """An open model; the metadata is the first part's, split.* keys included."""

    path: Path  # of the first part
    files: tuple[Path, ...]
    version: int
    alignment: int
    metadata: Mapping[str, Value]  # in file order
    tensors: Mapping[str, TensorInfo]  # in file order, part after part
    size_bytes: int  # of all parts
    descriptors: Mapping[Path, int]

    @staticmethod
    def open(path: Path | str) -> GgufFile:
        """Open a file, or a split model by any of its parts; reads headers only."""
        descriptors: dict[Path, int] = {}
        try:
            file = _open(Path(path), partial(_header, descriptors), Path.is_file, descriptors)
        except BaseException:
            _close(descriptors)
            raise
        weakref.finalize(file, _close, descriptors)
        return file

    @staticmethod
    def of_headers(path: Path, headers: Mapping[Path, Header]) -> GgufFile:
        """A model that lies elsewhere, by the headers of its parts: all but its tensors' bytes."""
        return _open(path, headers.__getitem__, headers.__contains__, {})

    @property
    def readable(self) -> bool:
        """Whether tensors can be read."""
        return bool(self.descriptors)

    def read_rows(
        self, name: str, first: int, last: int, out: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """uint8 [last - first, bytes of a row], in `out` where given; from any thread."""
        info = self.tensors[name]
        if not 0 <= first <= last <= info.rows:
            raise ValueError(f"rows {first} to {last} of {name}, which has {info.rows}")
        row_bytes = info.row_bytes
        shape = (last - first, row_bytes)
        if out is None:
            out = np.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, expected contiguous uint8 {shape}")
        if out.size:
            self.read_into(name, first * row_bytes, out.reshape(-1).data)
        return out

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the tensor's bytes from `offset` on; from any thread."""
        info = self.tensors[name]
        if not 0 <= offset <= offset + len(view) <= info.nbytes:
            raise ValueError(f"{len(view)} bytes from {offset} of {name}, which has {info.nbytes}")
        descriptor = self.descriptors.get(info.file)
        if descriptor is None:
            raise ValueError(f"{info.file} has been closed")
        _read_into(descriptor, info.start + offset, view, info)

    def close(self) -> None:
        """Give the descriptors back; nothing can be read afterwards."""
        _close(self.descriptors)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _close(descriptors: Mapping[Path, int]) -> None:
    assert isinstance(descriptors, dict)
    while descriptors:
        os.close(descriptors.popitem()[1])


def _read_into(descriptor: int, start: int, view: memoryview, info: TensorInfo) -> None:
    """Fill `view` with the bytes from `start`."""
    done = 0
    while done < len(view):
        try:
            got = os.preadv(descriptor, [view[done:]], start + done)
        except OSError as error:
            raise SourceError(f"{info.file}: cannot be read ({error.strerror})") from None
        if not got:
            raise FormatError(
                f"{info.file}: ends inside tensor {info.name!r}, though it was longer when it was "
                "opened"
            )
        done += got


def _open(
    path: Path,
    header_of: Callable[[Path], Header],
    there: Callable[[Path], bool],
    descriptors: Mapping[Path, int],
) -> GgufFile:
    """The model that `path` is, or is a part of; `there` says whether another part is."""
    header = header_of(path)
    files = part_names(path, header)
    count = len(files)
    if count == 1:
        return _joined(files, [header], header.metadata, descriptors)
    missing = [file.name for file in files if not there(file)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise SourceError(
            f"{path}: one of {count} parts, of which {len(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it: "
            f"{', '.join(missing[:3])}{more}; fetch them"
        )
    headers: list[Header] = []
    metadata, stated, total, read = header.metadata, -1, 0, 0
    for number, file in enumerate(files):
        part = header if file == path else header_of(file)
        _check_part(file, part, number, count)
        if number == 0:
            metadata, stated = part.metadata, _split(file, part, "split.tensors.count", -1)
        # Of the other parts only the tensors stay: their metadata may be as long as the first's.
        headers.append(replace(part, metadata={}))
        total, read = total + len(part.tensors), read + part.data_start
        if total > MAX_TENSORS or read > MAX_HEADER_BYTES:
            raise FormatError(
                f"{file}: {total} tensors and {read} bytes of headers up to this part; at most "
                f"{MAX_TENSORS} and {MAX_HEADER_BYTES} are read of all parts"
            )
    if stated not in (total, -1):
        raise FormatError(
            f"{files[0]}: split.tensors.count is {stated}, and the {count} parts have {total}; "
            "fetch them again"
        )
    return _joined(files, headers, metadata, descriptors)


def _header(descriptors: dict[Path, int], path: Path) -> Header:
    """The header of one file, which stays open."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path}: not a file; expected a .gguf file")
        descriptors[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        why = str(error.strerror)
        if error.errno == errno.EMFILE:
            why += f" beside {len(descriptors)} parts of its model; allow more with `ulimit -n`"
        raise SourceError(f"{path}: cannot be read ({why})") from None
    return read_header(descriptors[path], path)


def _split(path: Path, header: Header, key: str, default: int) -> int:
    """One of the numbers that say how parts belong together."""
    value = header.metadata.get(key)
    if value is None:
        return default
    if value.kind not in INTEGERS or value.value < 0:
        raise FormatError(f"{path}: {key} is {value.value!r}, expected a count")
    return int(value.value)


def part_names(path: Path, header: Header) -> tuple[Path, ...]:
    """The files of the model that `path` opens, by their names alone: one, or all parts."""
    count = _split(path, header, "split.count", 1)
    if count <= 1:
        return (path,)
    found = _PART.fullmatch(path.name)
    if count > MAX_PARTS:
        raise FormatError(f"{path}: one of {count} parts; at most {MAX_PARTS} are read")
    if found is None or int(found["count"]) != count or not 1 <= int(found["number"]) <= count:
        raise FormatError(
            f"{path}: one of {count} parts of a model, which must be called "
            f"NAME-00001-of-{count:05}.gguf to NAME-{count:05}-of-{count:05}.gguf"
        )
    return tuple(
        path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    )


def first_parts(files: Iterable[Path]) -> list[Path]:
    """Of some files, those that open a model: each but later parts of a split whose first is
    there too."""
    found = list(files)
    names = {file.name for file in found}

    def later(name: str) -> bool:
        part = _PART.fullmatch(name)
        if part is None or int(part["number"]) == 1:
            return False
        return f"{part['stem']}-00001-of-{part['count']}.gguf" in names

    return [file for file in found if not later(file.name)]


def _check_part(file: Path, part: Header, number: int, count: int) -> None:
    """This file must be the part that its name says."""
    stated = _split(file, part, "split.no", -1), _split(file, part, "split.count", -1)
    if stated != (number, count):
        raise FormatError(
            f"{file}: split.no and split.count are {stated[0]} and {stated[1]}, expected {number} "
            f"and {count} by its name; it belongs to another model or was renamed"
        )


def _joined(
    files: tuple[Path, ...],
    headers: list[Header],
    metadata: Mapping[str, Value],
    descriptors: Mapping[Path, int],
) -> GgufFile:
    tensors: dict[str, TensorInfo] = {}
    for part in headers:
        for info in part.tensors:
            if info.name in tensors:
                raise FormatError(
                    f"{info.file}: the tensor {info.name!r} is in {tensors[info.name].file.name} "
                    "already"
                )
            tensors[info.name] = info
    return GgufFile(
        files[0],
        files,
        headers[0].version,
        headers[0].alignment,
        MappingProxyType(dict(metadata)),
        MappingProxyType(tensors),
        sum(part.file_bytes for part in headers),
        descriptors,
    )
