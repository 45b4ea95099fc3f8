"""The older layout of llama.cpp's importance matrix, `imatrix.dat`; it is only read.

    file := n:i32  entry[n]  ( chunks:i32  ( length:i32 dataset )? )?
    entry := length:i32 name  calls:i32  values:i32  f32[values]

Little endian. A value is a sum of means, one for each call, so that weight = value / calls; where
the calls are 0 llama-quantize takes the values as they are, and so does this. The experts of a
tensor follow each other and share the number of calls; how many there are only the model tells.

Source: llama.cpp, common/imatrix-loader, of October 2026.
"""

import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]

_MAX_NAME = 1024
_MAX_DATASET = 1 << 16


def check_values(path: Path, name: str, values: Floats) -> None:
    """Sums of squares and counts are finite and not negative."""
    if not np.isfinite(values).all():
        raise FormatError(f"{path}: {name!r} has values that are not finite")
    if values.size and values.min() < 0:
        raise FormatError(f"{path}: {name!r} has negative values, which no sum of squares has")


class _Dat:
    """The .dat layout, read front to back, nothing of it beyond the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.left = os.fstat(file.fileno()).st_size
        file.seek(0)

    def bytes(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise FormatError(
                f"{self.path}: {what} takes {count} bytes and {self.left} are left of the file; "
                "it is truncated or no importance matrix"
            )
        self.left -= count
        found = self._file.read(count)
        if len(found) != count:
            raise FormatError(f"{self.path}: became shorter while it was read")
        return found

    def integer(self, what: str, least: int, most: int) -> int:
        (found,) = struct.unpack("<i", self.bytes(4, what))
        if not least <= found <= most:
            raise FormatError(
                f"{self.path}: {what}: {found}, expected {least} to {most}; it is damaged or no "
                "importance matrix"
            )
        return int(found)

    def string(self, what: str, least: int, most: int) -> str:
        raw = self.bytes(self.integer(f"the length of {what}", least, most), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"{self.path}: {what} is not UTF-8") from None


def read_dat(
    path: Path, file: BinaryIO, magic: bytes
) -> tuple[dict[str, Floats], dict[str, Counts], int, tuple[str, ...]]:
    """Sums [1, values] and calls [1] by tensor, chunks, datasets; magic: the first four bytes."""
    data = _Dat(path, file)
    smallest = 17  # bytes of an entry: three numbers, a name of one letter and one value
    most = data.left // smallest
    if len(magic) < 4 or not 1 <= struct.unpack("<i", magic)[0] <= most:
        raise FormatError(
            f"{path}: neither of llama.cpp's layouts of an importance matrix (begins with "
            f"{magic!r}); make one with `qtool calibrate MODEL --imatrix OUT.gguf`"
        )
    sums: dict[str, Floats] = {}
    counts: dict[str, Counts] = {}
    for number in range(data.integer("the number of entries", 1, most)):
        name = data.string(f"the name of entry {number}", 1, _MAX_NAME)
        if name in sums or "\0" in name:
            what = "comes twice" if name in sums else "has a null character"
            raise FormatError(f"{path}: the entry {name[:64]!r} {what}")
        calls = data.integer(f"the number of calls of {name!r}", 0, (1 << 31) - 1)
        size = data.integer(f"the number of values of {name!r}", 1, (1 << 31) - 1)
        values = np.frombuffer(data.bytes(4 * size, f"entry {name!r}"), "<f4")
        check_values(path, name, values)
        sums[name] = values.reshape(1, size)
        counts[name] = np.array([max(calls, 1)], dtype=np.int64)
    chunks = 0
    datasets: tuple[str, ...] = ()
    if data.left:
        chunks = data.integer("the number of chunks", 0, (1 << 31) - 1)
    if data.left:
        said = data.string("the dataset", 0, _MAX_DATASET)
        datasets = (said,) if said else ()
    if data.left:
        raise FormatError(f"{path}: it goes on after its end, for {data.left} bytes; it is damaged")
    return sums, counts, chunks, datasets
