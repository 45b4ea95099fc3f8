"""Global memory: arrays of a task, far apart, so that no address outside of one is inside another.

What is written there is noted: by which thread, and in which phase, that is after how many barriers
of its block.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.ptx.spaces import HIGHEST, NOBODY, Fault, Lanes, turned

APART = 40  # bits of an address inside of an array
MIDDLE = 1 << 39  # there arrays begin, so that what lies before one is told of that one


def begin_of(number: int) -> int:
    """Where array `number` of a launch begins, from 0 on."""
    return (number + 1 << APART) + MIDDLE


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


class Global:
    """The arrays, as threads of some blocks use them that run together; their numbers in the grid
    are from `first` on."""

    def __init__(
        self, arrays: list[Array], blocks: int, threads: int, first: int, order: Order, waits: bool
    ) -> None:
        self.arrays, self.order, self.waits = arrays, order, waits
        self.threads, self.first = threads, first
        self.lanes = np.arange(blocks * threads)
        self.block = self.lanes // threads
        self.phase = np.zeros(blocks, np.int32)
        self.waited = np.zeros(len(self.lanes), bool)

    def wait(self, lanes: Lanes) -> None:
        """For the kernels before this one."""
        self.waited[lanes] = True

    def find(self, at: Any, nbytes: int, what: str) -> tuple[Array, Any]:
        """The array that all addresses are in, and which runs of so many bytes they are."""
        one = int(at if at.ndim == 0 else at[0])
        number = one >> APART
        if not 0 < number <= len(self.arrays):
            raise Fault(f"{what} outside of every array, at address", one, len(self.arrays))
        array = self.arrays[number - 1]
        inside = at - np.uint64(begin_of(number - 1))
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
        return (found[..., 0] if count == 1 else found.T).copy()

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
                        int(grains[who == NOBODY][0]), len(owner))  # fmt: skip
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
