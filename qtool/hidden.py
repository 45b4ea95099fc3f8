"""Hidden states kept on the disk, so that a run that dies goes on with the next block.

Two files take turns, `hidden-0` and `hidden-1`: the states before block n stay while those before
block n + 1 are written. A file is one micro-batch after another, float32 [samples, length, width];
the checksum of each is in the journal, and states are believed only where it is right. Nothing
waits for the disk.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.native.sums import checksum
from qtool.stream import Stream, Workers


def keep(folder: Path, index: int, stream: Stream, workers: Workers) -> list[int]:
    """Write the states before block `index`; the checksum of each micro-batch."""
    starts, size = _starts(stream)
    descriptor = os.open(_path(folder, index), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, size)

        def write(number: int) -> int:
            raw = _bytes(stream.hidden[number])
            position, view = starts[number], raw.data
            while view:
                done = os.pwrite(descriptor, view, position)
                view, position = view[done:], position + done
            return checksum(raw)

        return workers.map(write, range(len(starts)))
    finally:
        os.close(descriptor)


def take_up(folder: Path, index: int, kept: Any, stream: Stream, workers: Workers) -> bool:
    """Put the states before block `index` into the stream, if they are there as `kept` says."""
    starts, size = _starts(stream)
    path = _path(folder, index)
    if not isinstance(kept, list) or len(kept) != len(starts):
        return False
    expected: list[int] = kept
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_size != size:
            return False

        def read(number: int) -> torch.Tensor:
            found = torch.empty(stream.hidden[number].shape, dtype=torch.float32)
            position, view = starts[number], _bytes(found).data
            while view and (got := os.preadv(descriptor, [view], position)):
                view, position = view[got:], position + got
            return found

        def good(number: int) -> bool:
            return checksum(_bytes(read(number))) == expected[number]

        # All are looked at before the first is believed; they need not fit in memory twice.
        if not all(workers.map(good, range(len(starts)))):
            return False
        for number in range(len(starts)):
            stream.hidden[number] = read(number)
        return True
    finally:
        os.close(descriptor)


def _path(folder: Path, index: int) -> Path:
    return folder / f"hidden-{index % 2}"


def _starts(stream: Stream) -> tuple[list[int], int]:
    """Where each micro-batch begins, and where the last one ends."""
    ends = np.cumsum([0, *(4 * hidden.numel() for hidden in stream.hidden)]).tolist()
    return ends[:-1], ends[-1]


def _bytes(hidden: torch.Tensor) -> NDArray[np.uint8]:
    """The same memory as bytes."""
    flat: NDArray[np.uint8] = hidden.contiguous().numpy().reshape(-1).view(np.uint8)
    return flat
