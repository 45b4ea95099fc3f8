"""States on their way through the blocks, in files: what a block is given is read from one, what it
gives goes into another, a micro-batch at a time. So they take no memory, however long the text is.

A file is one micro-batch after another, float32 [samples, length, columns].
"""

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from qtool.native.sums import checksum
from qtool.streaming.hidden import as_bytes, opened, read_at, write_at
from qtool.streaming.workers import Workers


class Passing:
    """Like a list of states. Threads may read and set different ones of them."""

    def __init__(self, path: Path) -> None:
        """None yet; those that are appended go into the file."""
        self.path = path  # from which they are read
        self.shapes: list[torch.Size] = []
        self.sums: list[int] = []  # checksums of what lies there
        self._starts = [0]
        self._next = path
        self._next_sums: list[int] = []

    def alike(self, path: Path) -> "Passing":
        """Others of the same shapes, none of which are known yet."""
        found = Passing(path)
        found.of_shapes(self.shapes)
        return found

    def of_shapes(self, shapes: Sequence[torch.Size]) -> None:
        """There are some of these shapes, none of which are known yet."""
        self.shapes = [*shapes]
        self._starts = [0, *accumulate(4 * shape.numel() for shape in shapes)]
        self.sums = [0] * len(self)

    def append(self, states: torch.Tensor) -> None:
        """One more micro-batch."""
        start = self._starts[-1]
        self.shapes.append(states.shape)
        self._starts.append(start + 4 * states.numel())
        with opened(self.path, os.O_RDWR | os.O_CREAT) as descriptor:
            self.sums.append(write_at(descriptor, start, states))

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> torch.Tensor:
        with opened(self.path, os.O_RDONLY) as descriptor:
            return read_at(descriptor, self._starts[number], self.shapes[number])

    def go_to(self, path: Path) -> None:
        """What is set from now on goes there, and is read after turn()."""
        self._next, self._next_sums = path, [0] * len(self)

    def __setitem__(self, number: int, states: torch.Tensor) -> None:
        assert states.shape == self.shapes[number] and self._next != self.path
        with opened(self._next, os.O_RDWR | os.O_CREAT) as descriptor:
            self._next_sums[number] = write_at(descriptor, self._starts[number], states)

    def turn(self) -> None:
        """All are set."""
        self.path, self.sums = self._next, self._next_sums

    def take(self, path: Path, sums: Any, workers: Workers) -> bool:
        """Read those from now on that lie there, if they are whole, as `sums` says."""
        if not isinstance(sums, list) or len(sums) != len(self):
            return False
        known: list[int] = sums
        try:
            with opened(path, os.O_RDONLY) as descriptor:
                if os.fstat(descriptor).st_size != self._starts[-1]:
                    return False

                def good(number: int) -> bool:
                    found = read_at(descriptor, self._starts[number], self.shapes[number])
                    return checksum(as_bytes(found)) == known[number]

                whole = all(workers.map(good, range(len(self))))
        except OSError:
            return False
        if whole:
            self.path, self.sums = path, known
        return whole
