"""Shared and local memory: rooms of one size, one a block or one a thread, and what is noted of
them for each grain, which is the narrowest access of a kernel."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

NOBODY, SEVERAL = -1, -2
Lanes = NDArray[np.int64]
HIGHEST, EVERY = np.maximum.reduce, np.logical_and.reduce  # without the way that methods go
STEPS = np.arange(32)


def turned(at: Any, nbytes: int) -> Any:
    """Addresses over a power of two; those that are no multiple of it become huge."""
    if nbytes == 1:
        return at
    places = nbytes.bit_length() - 1
    return at >> np.uint64(places) | at << np.uint64(64 - places)


class Fault(Exception):
    """An access that is not allowed: what, which element, of how many."""

    def __init__(self, what: str, at: int, count: int) -> None:
        super().__init__(f"{what} {at} of {count}")


class Shadow:
    """A space that is not global: `rooms` of `size` bytes, one a block or one a thread."""

    def __init__(self, size: int, rooms: int, grain: int) -> None:
        self.size, self.grain = size, grain
        self.stride = -(-size // 32) * 32  # of the widest access
        self.bytes = np.zeros(rooms * self.stride, np.uint8)
        self.filled = np.zeros(rooms * self.stride // grain, bool)
        self.fillings = self.filled.reshape(rooms, -1)
        self.whole = bytearray(self.fillings.shape[1])  # 1 where every room is filled
        self.views = {}
        for width in (1, 2, 4, 8):
            for count in (1, 2, 4):
                self.views[width, count] = self.bytes.view(f"u{width}").reshape(-1, count)

    def columns(self, width: int, count: int) -> Any:
        """The same by rooms."""
        return self.views[width, count].reshape(len(self.fillings), -1, count)

    def column(self, at: int, nbytes: int, what: str) -> tuple[int, slice]:
        """As places, of one address in every room."""
        self._check(at, at, nbytes, what)
        grain = at // self.grain
        return at // nbytes, slice(grain, grain + nbytes // self.grain)

    def _check(self, top: int, every: int, nbytes: int, what: str) -> None:
        if top + nbytes > self.size:
            raise Fault(f"{what} memory, byte", top, self.size)
        if every & (nbytes - 1):
            raise Fault(f"{what} memory at an address that is no multiple of its size, byte", top,
                        self.size)  # fmt: skip

    def places(self, room: Lanes, at: Any, nbytes: int, what: str) -> tuple[Any, Any]:
        """Numbers of the runs of so many bytes, and of their grains."""
        if at.ndim == 0:
            at = np.full(room.shape, at)
        run = turned(at, nbytes)
        if int(HIGHEST(run)) >= self.size // nbytes:
            self._check(int(at.max()), int(np.bitwise_or.reduce(at)), nbytes, what)
        place = room * (self.stride // nbytes) + run.view(np.int64)
        count = nbytes // self.grain
        return place, place if count == 1 else place[:, None] * count + STEPS[:count]


class Meetings:
    """Who touched shared memory, and in which phase."""

    def __init__(self, grains: int) -> None:
        self.writer = np.full(grains, NOBODY, np.int64)
        self.reader = np.full(grains, NOBODY, np.int64)
        self.write_phase = np.full(grains, -1, np.int32)
        self.read_phase = np.full(grains, -1, np.int32)

    def read(self, grains: Any, lanes: Any, phase: Any) -> bool:
        """Notes it; whether that is allowed."""
        wrote = (self.write_phase[grains] == phase) & (self.writer[grains] != lanes)
        again = (self.read_phase[grains] == phase) & (self.reader[grains] != lanes)
        self.reader[grains] = np.where(again, SEVERAL, lanes)
        # Of two lanes of one access, the last is noted: then there are several.
        self.reader[grains] = np.where(self.reader[grains] != lanes, SEVERAL, self.reader[grains])
        self.read_phase[grains] = phase
        return not wrote.any()

    def write(self, grains: Any, lanes: Any, phase: Any) -> bool:
        wrote = (self.write_phase[grains] == phase) & (self.writer[grains] != lanes)
        read = (self.read_phase[grains] == phase) & (self.reader[grains] != lanes)
        self.writer[grains] = lanes
        self.write_phase[grains] = phase
        return not (wrote.any() or read.any() or (self.writer[grains] != lanes).any())
