"""Writing safetensors files whose whole layout is known before the first tensor is.

specs -> plan_shards -> Layout -> StreamWriter: headers first, then tensors in any order
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qtool.errors import FormatError, UnsupportedError, UsageError
from qtool.formats.dtypes import NUMPY_DTYPES
from qtool.formats.safetensors_header import (
    TensorInfo,
    read_range,
)
from qtool.formats.safetensors_layout import INDEX_NAME, Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


def _write_failed(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnsupportedError(f"{path}: the disk is full; free some space or choose another -o")
    return UnsupportedError(f"{path}: cannot be written ({error.strerror})")


_AT_ONCE = 1 << 22  # bytes of a tensor, read back together


def checksum(path: Path, info: TensorInfo) -> int:
    """CRC-32 of a tensor in a file, which may be larger than memory."""
    found = 0
    for start in range(info.start, info.end, _AT_ONCE):
        piece = replace(info, start=start, end=min(info.end, start + _AT_ONCE))
        found = zlib.crc32(read_range(path, piece).data, found)
    return found


@dataclass
class StreamWriter:
    """Writes a layout into an existing folder: headers first, then tensors in any order.

    `checksums` holds the CRC-32 of every tensor added, for reading back. Files that an earlier run
    left there are written on; `restore` takes over what is whole in them.
    """

    folder: Path
    layout: Layout
    checksums: dict[str, int] = field(default_factory=dict)
    _files: dict[str, int] = field(default_factory=dict, repr=False)
    _places: dict[str, tuple[str, TensorInfo]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        free = shutil.disk_usage(self.folder).free
        there = (self.folder / file.name for file in self.layout.files)
        needed = self.layout.size - sum(p.stat().st_blocks * 512 for p in there if p.exists())
        if needed > free:
            raise UnsupportedError(
                f"{self.folder}: the disk is full: {needed} bytes are needed, "
                f"{free} are free; choose another -o"
            )
        for file in self.layout.files:
            path = self.folder / file.name
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
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
        """Store one tensor: raw bytes, a uint8 array of them, or an array of the tensor's shape:
        one of bytes where numpy has no such dtype (small floats)."""
        file, info = self._place(name)
        array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        raw = array.ndim == 1 and array.dtype == np.uint8 and array.size == info.nbytes
        dtype = np.dtype(NUMPY_DTYPES.get(info.dtype, "|u1"))
        if not raw and (array.shape != info.shape or array.dtype != dtype):
            raise FormatError(
                f"{name}: the layout has {info.dtype} {list(info.shape)}, "
                f"given {array.dtype} {list(array.shape)}"
            )
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._write(file, info.start, view)
        self.checksums[name] = zlib.crc32(view)

    def add_parts(self, name: str, parts: Iterable[NDArray[Any]]) -> None:
        """Store one tensor that is never whole in memory: its bytes in order, as arrays of any
        shape. FormatError where they are not as many as the layout has."""
        file, info = self._place(name)
        position, found = info.start, 0
        for part in parts:
            view = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            if position + len(view) > info.end:
                position += len(view)
                break
            self._write(file, position, view)
            position, found = position + len(view), zlib.crc32(view, found)
        if position != info.end:
            raise FormatError(
                f"{name}: the layout has {info.nbytes} bytes, given "
                f"{'at least ' if position > info.end else ''}{position - info.start}"
            )
        self.checksums[name] = found

    def _place(self, name: str) -> tuple[str, TensorInfo]:
        """The file and bytes of a tensor that is still to be written."""
        if name not in self._places:
            raise FormatError(f"{name}: not in the layout of {self.folder}")
        if name in self.checksums:
            raise FormatError(f"{name}: written twice")
        return self._places[name]

    def restore(self, checksums: Mapping[str, int]) -> bool:
        """Take over tensors of an earlier run, if the files have every one of them as it was."""
        for name, expected in checksums.items():
            if name in self.checksums and self.checksums[name] == expected:
                continue  # seen to before
            if name not in self._places:
                return False
            file, info = self._places[name]
            if checksum(self.folder / file, info) != expected:
                return False
        self.checksums.update(checksums)
        return True

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


def parse_size(text: str, option: str) -> int:
    """Bytes from "5GB", "500MB", "2GiB" or a plain number; UsageError for anything else.

    Nothing is no size either. option: such as --max-ram, for the sentence.
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found:
        raise UsageError(f"{option}: {text!r} is no size; write it like 5GB or 500MiB")
    number, prefix, binary = found.groups()
    power = " kmgt".index(prefix) if prefix else 0
    size = int(float(number) * (1024 if binary else 1000) ** power)
    if not size:
        raise UsageError(f"{option}: a size of {text!r} holds nothing; write it like 5GB or 500MiB")
    return size
