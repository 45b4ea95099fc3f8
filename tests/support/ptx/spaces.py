"""Shared and local memory: rooms of one size, one a block or one a thread, and what is noted of
them for each grain, which is the narrowest access of a kernel."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

NOBODY, SEVERAL, OF_WARP = -1, -2, -3  # several of warp n are OF_WARP - n
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
    """Who touched shared memory, in which phase of its block, and in which of its warp: lanes that
    met their warp come after all that the warp did before. Of readers in several phases of a warp
    the last phase counts."""

    def __init__(self, grains: int) -> None:
        self.writer = np.full(grains, NOBODY, np.int64)
        self.reader = np.full(grains, NOBODY, np.int64)
        self.write_phase = np.full(grains, -1, np.int32)
        self.read_phase = np.full(grains, -1, np.int32)
        self.write_turn = np.zeros(grains, np.int32)
        self.read_turn = np.zeros(grains, np.int32)

    @staticmethod
    def _warp(who: Any) -> Any:
        """Of a lane, or of several of one warp; nobody's and that of several ones are their own."""
        return np.where(who >= 0, who // 32, np.where(who <= OF_WARP, OF_WARP - who, who))

    def read(self, grains: Any, lanes: Any, phase: Any, turn: Any) -> bool:
        """Notes it; whether that is allowed."""
        writer = self.writer[grains]
        before = (self._warp(writer) == lanes // 32) & (self.write_turn[grains] < turn)
        wrote = (self.write_phase[grains] == phase) & (writer != lanes) & ~before
        old = self.reader[grains]
        again = (self.read_phase[grains] == phase) & (old != lanes)
        who = np.where(again, self._together(old, lanes), lanes)
        self.reader[grains] = who
        # Of several lanes of one access the last is noted: the others make it several.
        last = self.reader[grains]
        if (lost := last != who).any():
            both = self._together(last, lanes)
            for mixed in (lost & (both != SEVERAL), lost & (both == SEVERAL)):
                self.reader[grains[mixed]] = both[mixed]
        self.read_phase[grains] = phase
        self.read_turn[grains] = turn
        return not wrote.any()

    @classmethod
    def _together(cls, who: Any, lanes: Any) -> Any:
        """What `who` and a lane are together."""
        own = lanes // 32
        return np.where(cls._warp(who) == own, OF_WARP - own, SEVERAL)

    def write(self, grains: Any, lanes: Any, phase: Any, turn: Any) -> bool:
        writer, reader = self.writer[grains], self.reader[grains]
        wrote = (self.write_phase[grains] == phase) & (writer != lanes)
        wrote &= ~((self._warp(writer) == lanes // 32) & (self.write_turn[grains] < turn))
        read = (self.read_phase[grains] == phase) & (reader != lanes)
        read &= ~((self._warp(reader) == lanes // 32) & (self.read_turn[grains] < turn))
        self.writer[grains] = lanes
        self.write_phase[grains] = phase
        self.write_turn[grains] = turn
        return not (wrote.any() or read.any() or (self.writer[grains] != lanes).any())
