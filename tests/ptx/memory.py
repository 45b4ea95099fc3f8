"""Memory of a launch, and what is checked of every access.

Arrays of a task are mapped far apart, so that no address outside of one is inside of another. Of
what is written there is a note for each grain (the narrowest access of the kernel) of who wrote it,
and when: in which phase, which are the barriers that its block has passed.

    global      inside of an array, at a multiple of its size; written once, by one thread, and never
                where a kernel says that it only reads; read by others only in order (Order)
    shared      the same of its own size; no two threads touch a grain in one phase, of which one
                writes; nothing is read that no thread wrote
    local       nothing is read that the thread did not write
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.emit import LOCAL, SHARED

APART = 40  # bits of an address inside of an array
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


@dataclass
class Array:
    """Of a task, or a table of constants; `grain` bytes have one note of who wrote them."""

    name: str
    bytes: NDArray[np.uint8]
    written: bool = False  # whether a kernel may write it
    grain: int = 1
    real: int = 0  # where it is
    early: bool = False
    owner: NDArray[np.int64] | None = None
    phase: NDArray[np.int32] | None = None
    only_read: bool = False  # by a load that says so
    views: dict[tuple[int, int], NDArray[Any]] = field(default_factory=dict)

    def view(self, size: int, count: int) -> NDArray[Any]:
        """Runs of `count` numbers of `size` bytes."""
        found = self.views.get((size, count))
        if found is None:
            whole = len(self.bytes) // (size * count) * size * count
            found = self.bytes[:whole].view(f"u{size}").reshape(-1, count)
            self.views[size, count] = found
        return found

    def notes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        if self.owner is None or self.phase is None:
            grains = -(-len(self.bytes) // self.grain)
            self.owner = np.full(grains, NOBODY, np.int64)
            self.phase = np.zeros(grains, np.int32)
        return self.owner, self.phase


def of_address(name: str, address: int, nbytes: int, written: bool, grain: int) -> Array:
    raw = (ctypes.c_uint8 * nbytes).from_address(address) if nbytes else b""
    if address % 16:
        raise ValueError(f"{name} begins at no multiple of 16 bytes")
    return Array(name, np.frombuffer(raw, np.uint8), written, grain, address)


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


@dataclass
class Order:
    """What blocks know of each other by atomics that release and acquire: how often they were made,
    and for each block the last time and the phase that it was in."""

    now: int
    time: NDArray[np.int64]
    phase: NDArray[np.int32]

    def counts(self, block: int, phase: int) -> None:
        self.now += 1
        self.time[block], self.phase[block] = self.now, phase


class Memory:
    """The spaces of some blocks that run together; threads have numbers in the grid, `first` on."""

    def __init__(
        self,
        arrays: list[Array],
        blocks: int,
        threads: int,
        first: int,
        order: Order,
        sizes: dict[str, int],
        grains: dict[str, int],
        waits: bool,
    ) -> None:
        self.arrays, self.order, self.waits = arrays, order, waits
        self.threads, self.first = threads, first
        self.lanes = np.arange(blocks * threads)
        self.block = self.lanes // threads
        self.phase = np.zeros(blocks, np.int32)
        self.waited = np.zeros(len(self.lanes), bool)
        self.shared = Shadow(sizes["shared"], blocks, grains["shared"])
        self.local = Shadow(sizes["local"], len(self.lanes), grains["local"])
        self.meetings = Meetings(len(self.shared.filled))

    # Global memory.

    def find(self, at: Any, nbytes: int, what: str) -> tuple[Array, Any]:
        """The array that all addresses are in, and which runs of so many bytes they are."""
        one = int(at if at.ndim == 0 else at[0])
        number = one >> APART
        if not 0 < number <= len(self.arrays):
            raise Fault(f"{what} outside of every array, at address", one, len(self.arrays))
        array = self.arrays[number - 1]
        inside = at - np.uint64(number << APART)
        run = turned(inside, nbytes)
        if int(HIGHEST(run) if at.ndim else run) >= len(array.bytes) // nbytes:
            self._refuse(array, np.atleast_1d(inside), nbytes, what)
        return array, run.view(np.int64)

    @staticmethod
    def _refuse(array: Array, inside: Any, nbytes: int, what: str) -> None:
        """Says which address lies outside, or is no multiple of so many bytes."""
        size = len(array.bytes)
        past = (inside > np.uint64(max(size - nbytes, 0))) | (size < nbytes)
        if past.any():
            wrong = int(inside[past][0].view(np.int64))
            raise Fault(f"{what} outside of the array {array.name}, byte", wrong, size)
        odd = int(inside[(inside & np.uint64(nbytes - 1)) != 0][0])
        raise Fault(f"{what} at an address that is no multiple of its size, byte", odd, size)

    @staticmethod
    def _several(at: Any) -> bool:
        """Whether addresses are of more than one array."""
        return bool(np.bitwise_or.reduce(at ^ at[0]) >> np.uint64(APART))

    def _apart(self, at: Any) -> list[Any]:
        """Which of several addresses are in one array."""
        number = at >> np.uint64(APART)
        return [number == one for one in np.unique(number)]

    def load_global(self, lanes: Lanes, at: Any, size: int, count: int, only: bool) -> Any:
        if at.ndim and self._several(at):
            found = np.empty((count, len(at)), f"u{size}")
            for own in self._apart(at):
                part = self.load_global(lanes[own], at[own], size, count, only)
                found[:, own] = part
            return found[0] if count == 1 else found
        array, place = self.find(at, size * count, "read")
        if array.written or self.waits:
            self._check_read(array, lanes, place, size * count, only)
        array.only_read |= only
        found = array.view(size, count)[place]
        return found[..., 0] if count == 1 else found.T

    def _check_read(self, array: Array, lanes: Lanes, place: Any, nbytes: int, only: bool) -> None:
        if self.waits and array.real and not self.waited[lanes].all():
            array.early = True
        if array.owner is None:
            return
        if only:
            raise Fault(f"{array.name} is written, and read as if nobody did, element", 0, 1)
        owner, phase = array.notes()
        grains = self._grains(array, np.broadcast_to(place, lanes.shape), nbytes)
        who, when = owner[grains], phase[grains]
        if (who == NOBODY).any():
            raise Fault(f"read of {array.name} before it was written, grain",
                        int(grains.ravel()[np.argmax((who == NOBODY).ravel())]), len(owner))  # fmt: skip
        me = (lanes + self.first)[:, None]
        mine, theirs = me // self.threads, who // self.threads
        here = self.phase[self.block[lanes]][:, None]
        in_block = (mine == theirs) & (when < here)
        order = self.order
        released = (order.time[theirs] > 0) & (when < order.phase[theirs])
        acquired = (order.time[mine] >= order.time[theirs]) & (here > order.phase[mine])
        if not ((who == me) | in_block | (released & acquired)).all():
            raise Fault(f"race: {array.name} is read while another thread writes it, grain",
                        int(grains.ravel()[0]), len(owner))  # fmt: skip

    @staticmethod
    def _grains(array: Array, place: Any, nbytes: int) -> Any:
        count = nbytes // array.grain
        return place[:, None] * count + np.arange(count)

    def store_global(self, lanes: Lanes, at: Any, size: int, values: list[Any]) -> None:
        at = np.broadcast_to(np.asarray(at), lanes.shape)
        if self._several(at):
            for own in self._apart(at):
                parts = [np.broadcast_to(value, lanes.shape)[own] for value in values]
                self.store_global(lanes[own], at[own], size, parts)
            return
        nbytes = size * len(values)
        array, place = self.find(at, nbytes, "write")
        if not array.written or array.only_read:
            raise Fault(f"write to {array.name}, which is only read, run", int(place[0]), 0)
        if self.waits and not self.waited[lanes].all():
            raise Fault("used without having waited for the kernels before, element",
                        int(place[0]), len(array.bytes) // size)  # fmt: skip
        owner, phase = array.notes()
        grains = self._grains(array, place, nbytes)
        me = (lanes + self.first)[:, None]
        twice = owner[grains] != NOBODY
        owner[grains] = me
        twice |= owner[grains] != me
        if twice.any():
            which = int(np.argmax(twice.any(1)))
            raise Fault("written twice, element", int(place[which]), len(array.bytes) // nbytes)
        phase[grains] = self.phase[self.block[lanes]][:, None]
        view = array.view(size, len(values))
        for k, value in enumerate(values):
            view[place, k] = value

    def count_up(self, lanes: Lanes, at: Any, value: Any) -> Any:
        """atom.acq_rel.add: one lane after the other."""
        at = np.broadcast_to(np.asarray(at), lanes.shape)
        array, place = self.find(at, 4, "write")
        if not array.written:
            raise Fault(f"write to {array.name}, which is only read, run", int(place[0]), 0)
        if self.waits and not self.waited[lanes].all():
            raise Fault("used without having waited for the kernels before, element",
                        int(place[0]), len(array.bytes) // 4)  # fmt: skip
        found = np.empty(len(lanes), np.uint32)
        view, value = array.view(4, 1), np.broadcast_to(value, lanes.shape)
        for k, lane in enumerate(lanes):
            found[k] = view[place[k], 0]
            view[place[k], 0] = found[k] + value[k]
            block = self.block[lane]
            self.order.counts(int(self.first // self.threads + block), int(self.phase[block]))
        return found

    # Shared and local memory.

    def load_shared(self, lanes: Lanes, at: Any, size: int, count: int) -> Any:
        block = self.block[lanes]
        place, grains = self.shared.places(block, at, size * count, "read outside of shared")
        if not self.shared.filled[grains].all():
            raise Fault("read of shared memory that no thread wrote, byte",
                        int(at.max()), self.shared.size)  # fmt: skip
        shape = (-1,) + (1,) * (grains.ndim - 1)
        if not self.meetings.read(grains, lanes.reshape(shape), self.phase[block].reshape(shape)):
            raise Fault("race: shared memory is read while another thread writes it, byte",
                        int(at.max()), self.shared.size)  # fmt: skip
        found = self.shared.views[size, count][place]
        return found[:, 0] if count == 1 else found.T

    def store_shared(self, lanes: Lanes, at: Any, size: int, values: list[Any]) -> None:
        block = self.block[lanes]
        nbytes = size * len(values)
        place, grains = self.shared.places(block, at, nbytes, "write outside of shared")
        shape = (-1,) + (1,) * (grains.ndim - 1)
        if not self.meetings.write(grains, lanes.reshape(shape), self.phase[block].reshape(shape)):
            raise Fault("race: shared memory is written while another thread uses it, byte",
                        int(at.max()), self.shared.size)  # fmt: skip
        self.shared.filled[grains] = True
        for k, value in enumerate(values):
            self.shared.views[size, len(values)][place, k] = value

    def load_local(self, lanes: Lanes, at: Any, size: int, count: int) -> Any:
        if at.ndim == 0:
            return self._load_one(lanes, int(at), size, count)
        place, grains = self.local.places(lanes, at, size * count, "read outside of local")
        if not EVERY(self.local.filled[grains], axis=None):
            raise Fault("read of local memory that the thread did not write, byte",
                        int(at.max()), self.local.size)  # fmt: skip
        found = self.local.views[size, count][place]
        return found[:, 0] if count == 1 else found.T

    def store_local(self, lanes: Lanes, at: Any, size: int, values: list[Any]) -> None:
        if at.ndim == 0:
            return self._store_one(lanes, int(at), size, values)
        nbytes = size * len(values)
        place, grains = self.local.places(lanes, at, nbytes, "write outside of local")
        self.local.filled[grains] = True
        for k, value in enumerate(values):
            self.local.views[size, len(values)][place, k] = value

    def _load_one(self, lanes: Lanes, at: int, size: int, count: int) -> Any:
        """From one address for all lanes."""
        local, nbytes = self.local, size * count
        place, grains = local.column(at, nbytes, "read outside of local")
        if not all(local.whole[grains]):
            part = local.fillings[:, grains] if lanes is self.lanes else local.fillings[lanes, grains]
            if not part.all():
                raise Fault("read of local memory that the thread did not write, byte", at, local.size)
        columns = local.columns(size, count)
        found = columns[:, place] if lanes is self.lanes else columns[lanes, place]
        return found[:, 0].copy() if count == 1 else found.T.copy()

    def _store_one(self, lanes: Lanes, at: int, size: int, values: list[Any]) -> None:
        local = self.local
        place, grains = local.column(at, size * len(values), "write outside of local")
        columns = local.columns(size, len(values))
        if lanes is self.lanes:
            local.whole[grains] = b"\1" * (grains.stop - grains.start)
            local.fillings[:, grains] = True
            for k, value in enumerate(values):
                columns[:, place, k] = value
        else:
            local.fillings[lanes, grains] = True
            for k, value in enumerate(values):
                columns[lanes, place, k] = value

    # Addresses that say by themselves which space they are of.

    def _spaces(self, lanes: Lanes, at: Any) -> list[tuple[str, Any, Any]]:
        at = np.broadcast_to(np.asarray(at), lanes.shape)
        begins = {"global": 0, "local": LOCAL, "shared": SHARED}
        high = at >> np.uint64(56)
        return [
            (space, own, at[own] - np.uint64(begin))
            for space, begin in begins.items()
            if (own := high == begin >> 56).any()
        ]

    def load_generic(self, lanes: Lanes, at: Any, size: int, count: int) -> Any:
        found = np.empty((count, len(lanes)), f"u{size}")
        for space, own, there in self._spaces(lanes, at):
            more = (False,) if space == "global" else ()
            load = getattr(self, f"load_{space}")
            found[:, own] = load(lanes[own], there, size, count, *more)
        return found[0] if count == 1 else found

    def store_generic(self, lanes: Lanes, at: Any, size: int, values: list[Any]) -> None:
        for space, own, there in self._spaces(lanes, at):
            parts = [np.broadcast_to(value, lanes.shape)[own] for value in values]
            getattr(self, f"store_{space}")(lanes[own], there, size, parts)

    def wait(self, lanes: Lanes) -> None:
        """For the kernels before this one."""
        self.waited[lanes] = True
