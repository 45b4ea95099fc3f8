"""Hidden states on the disk: so that a run that dies goes on with the next block, and so that they
take no memory where a budget leaves none for them.

Two files take turns, `hidden-0` and `hidden-1`: the states before block n stay while those before
block n + 1 are written. A file is one micro-batch after another, float32 [samples, length, width];
the checksum of each is in the journal, and states are believed only where it is right. Nothing
waits for the disk.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.native.sums import checksum
from qtool.streaming.stream import Stream
from qtool.streaming.workers import Workers


class OnDisk:
    """The states of a stream in files, read when asked for; else like a list of them.

    What a block returns for a micro-batch goes into the other file than what it was given.
    """

    def __init__(self, folder: Path) -> None:
        """The states before the first block, which are appended, go into a file of their own."""
        self.folder = folder
        self._places: list[tuple[int, torch.Size]] = []  # by micro-batch
        self._files: list[str] = []  # which one holds it
        self._sums: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(len(self)))

    def append(self, states: torch.Tensor) -> None:
        """One more micro-batch."""
        self._places.append((self._size, states.shape))
        self._files.append(_FIRST)
        self._sums.append(0)
        self._size += 4 * states.numel()
        self._write(len(self) - 1, states)

    def __getitem__(self, number: int) -> torch.Tensor:
        start, shape = self._places[number]
        with opened(self.folder / self._files[number], os.O_RDONLY) as descriptor:
            return read_at(descriptor, start, shape)

    def __setitem__(self, number: int, states: torch.Tensor) -> None:
        self._files[number] = _NEXT[self._files[number]]
        self._write(number, states)

    def _write(self, number: int, states: torch.Tensor) -> None:
        start, shape = self._places[number]
        assert states.shape == shape
        with opened(self.folder / self._files[number], os.O_RDWR | os.O_CREAT) as descriptor:
            self._sums[number] = write_at(descriptor, start, states)

    def shapes(self) -> list[torch.Size]:
        """The shape of each micro-batch."""
        return [shape for _, shape in self._places]

    def sums(self) -> list[int]:
        """The checksum of each micro-batch. Those before the first block are needed no more."""
        if _FIRST not in self._files:
            (self.folder / _FIRST).unlink(missing_ok=True)
        return list(self._sums)

    def turn_to(self, index: int, sums: list[int]) -> None:
        """Take the states from the file of those before block `index`."""
        self._files = [_path(self.folder, index).name] * len(self)
        self._sums = list(sums)


_FIRST = "hidden-first"
_NEXT = {_FIRST: "hidden-1", "hidden-1": "hidden-0", "hidden-0": "hidden-1"}


def keep(folder: Path, index: int, stream: Stream, workers: Workers) -> list[int]:
    """Write the states before block `index`; the checksum of each micro-batch."""
    if isinstance(stream.hidden, OnDisk):
        return stream.hidden.sums()
    hidden = stream.hidden
    starts, size = _starts(stream)
    with opened(_path(folder, index), os.O_RDWR | os.O_CREAT) as descriptor:
        os.truncate(descriptor, size)

        def write(number: int) -> int:
            return write_at(descriptor, starts[number], hidden[number])

        return workers.map(write, range(len(starts)))


def take_up(folder: Path, index: int, kept: Any, stream: Stream, workers: Workers) -> bool:
    """Put the states before block `index` into the stream, if they are there as `kept` says."""
    return whole(folder, index, kept, stream, workers) and put(folder, index, kept, stream)


def whole(folder: Path, index: int, kept: Any, stream: Stream, workers: Workers) -> bool:
    """Whether the states before block `index` are there as `kept` says; the stream stays."""
    starts, size = _starts(stream)
    path = _path(folder, index)
    if not isinstance(kept, list) or len(kept) != len(starts):
        return False
    sums: list[int] = kept
    shapes = _shapes(stream)
    try:
        with opened(path, os.O_RDONLY) as descriptor:
            if os.fstat(descriptor).st_size != size:
                return False

            def good(number: int) -> bool:
                found = read_at(descriptor, starts[number], shapes[number])
                return checksum(as_bytes(found)) == sums[number]

            # All are looked at before the first is believed; they need not fit in memory twice.
            return all(workers.map(good, range(len(starts))))
    except OSError:
        return False


def put(folder: Path, index: int, kept: list[int], stream: Stream) -> bool:
    """Put the states before block `index`, which are whole(), into the stream."""
    hidden = stream.hidden
    if isinstance(hidden, OnDisk):
        hidden.turn_to(index, kept)
        return True
    starts, _ = _starts(stream)
    shapes = _shapes(stream)
    with opened(_path(folder, index), os.O_RDONLY) as descriptor:
        for number in range(len(starts)):
            hidden[number] = read_at(descriptor, starts[number], shapes[number])
    return True


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor, for flags as os.open() has them."""
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, start: int, states: torch.Tensor) -> int:
    """Write float32 states where they belong; their checksum."""
    raw = as_bytes(states)
    view = raw.data
    while view:
        done = os.pwrite(descriptor, view, start)
        view, start = view[done:], start + done
    return checksum(raw)


def read_at(descriptor: int, start: int, shape: torch.Size) -> torch.Tensor:
    """States of this shape; zeros where the file ends before them."""
    found = torch.zeros(shape)
    view = as_bytes(found).data
    while view and (got := os.preadv(descriptor, [view], start)):
        view, start = view[got:], start + got
    return found


def _path(folder: Path, index: int) -> Path:
    return folder / f"hidden-{index % 2}"


def _shapes(stream: Stream) -> list[torch.Size]:
    if isinstance(stream.hidden, OnDisk):
        return stream.hidden.shapes()
    return [hidden.shape for hidden in stream.hidden]


def _starts(stream: Stream) -> tuple[list[int], int]:
    """Where each micro-batch begins in a file, and where the last one ends."""
    sizes = [4 * shape.numel() for shape in _shapes(stream)]
    starts = list(accumulate(sizes, initial=0))
    return starts[:-1], starts[-1]


def as_bytes(hidden: torch.Tensor) -> NDArray[np.uint8]:
    """The same memory as bytes."""
    flat: NDArray[np.uint8] = hidden.contiguous().numpy().reshape(-1).view(np.uint8)
    return flat
