"""Memory of a launch, and what is checked of every access.

global      inside of an array, at a multiple of its size; written once, by one thread, and
            never where a kernel says that it only reads; read by others only in order (Order)
shared      the same of its own size; no two threads touch a grain in one phase, of which one
            writes, unless their warp met between; nothing is read that no thread wrote, or that is
            copied and was not waited for
local       nothing is read that the thread did not write
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from support.ptx.arrays import Array, Global, Order
from support.ptx.emit import LOCAL, SHARED
from support.ptx.spaces import EVERY, Fault, Lanes, Meetings, Shadow


class Memory(Global):
    """All spaces of some blocks: `sizes` in bytes, and the `grains` of what is noted of them."""

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
        super().__init__(arrays, blocks, threads, first, order, waits)
        self.shared = Shadow(sizes["shared"], blocks, grains["shared"])
        self.local = Shadow(sizes["local"], len(self.lanes), grains["local"])
        self.meetings = Meetings(len(self.shared.filled))
        self.turn = np.zeros(len(self.lanes), np.int32)  # how often a lane has met its warp
        self.closed = np.zeros(len(self.lanes), np.int32)  # groups of copies
        self.copies: list[tuple[Lanes, Any, Any, Any]] = []  # lanes, their groups, where to, what
        # Grains to which copies are under way.
        self.coming = np.zeros(len(self.shared.filled), bool)

    def whole_warps(self, lanes: Lanes, what: str) -> None:
        if (
            len(lanes) % 32
            or (lanes.reshape(-1, 32) != lanes[::32, None] + np.arange(32)).any()
            or (lanes[::32] % 32).any()
        ):
            raise Fault(f"{what} by a part of a warp, lane", int(lanes[0]), len(self.lanes))

    def meet_warps(self, lanes: Lanes) -> None:
        """At one instruction: that parts of a warp may come there by several is not known here."""
        self.whole_warps(lanes, "bar.warp.sync")
        self.turn[lanes] += 1

    # Asynchronous copies: until a thread waits for one, the place has nothing that may be read, and
    # is being written.

    def copy_async(self, lanes: Lanes, to: Any, at: Any, nbytes: int) -> None:
        to, at = (np.broadcast_to(np.asarray(place), lanes.shape) for place in (to, at))
        found = np.atleast_2d(self.load_global(lanes, at, 4, nbytes // 4, False))
        _, grains = self._touch(lanes, to, nbytes)
        self.shared.filled[grains] = False
        self.coming[grains] = True
        self.copies.append((lanes, self.closed[lanes], to, found))

    def close_copies(self, lanes: Lanes) -> None:
        self.closed[lanes] += 1

    def wait_for_copies(self, lanes: Lanes, left: int) -> None:
        """For all groups of a thread but so many."""
        waits = np.zeros(len(self.lanes), bool)
        waits[lanes] = True
        copies, self.copies = self.copies, []
        for who, group, to, found in copies:
            come = waits[who] & (group < self.closed[who] - left)
            if come.any():
                own = who[come]
                grains = self.shared.places(self.block[own], to[come], 4 * len(found), "copy to")[1]
                self.coming[grains] = False
                self.store_shared(own, to[come], 4, list(found[:, come]))
            if not come.all():
                rest = ~come
                self.copies.append((who[rest], group[rest], to[rest], found[:, rest]))

    def end(self, lanes: Lanes) -> None:
        """Of threads, none of whose copies may be under way."""
        for who, *_ in self.copies:
            if (left := np.isin(who, lanes)).any():
                raise Fault("a thread ends before its copies have come, number",
                            int(who[left][0]) % self.threads, self.threads)  # fmt: skip

    def _now(self, lanes: Lanes, grains: Any) -> Iterator[Any]:
        """Lanes, the phases of their blocks and those of their warps, beside their grains."""
        shape = (-1,) + (1,) * (grains.ndim - 1)
        return (x.reshape(shape) for x in (lanes, self.phase[self.block[lanes]], self.turn[lanes]))

    def _touch(self, lanes: Lanes, at: Any, nbytes: int) -> Any:
        """Notes a write to shared memory; the runs of so many bytes, and their grains."""
        block = self.block[lanes]
        place, grains = self.shared.places(block, at, nbytes, "write outside of shared")
        now = self._now(lanes, grains)
        if self.coming[grains].any() or not self.meetings.write(grains, *now):
            raise Fault("race: shared memory is written while another thread uses it, or a copy is "
                        "under way, byte", int(at.max()), self.shared.size)  # fmt: skip
        return place, grains

    def load_shared(self, lanes: Lanes, at: Any, size: int, count: int) -> Any:
        block = self.block[lanes]
        place, grains = self.shared.places(block, at, size * count, "read outside of shared")
        if not self.shared.filled[grains].all():
            raise Fault("read of shared memory that no thread wrote, byte",
                        int(at.max()), self.shared.size)  # fmt: skip
        if not self.meetings.read(grains, *self._now(lanes, grains)):
            raise Fault("race: shared memory is read while another thread writes it, byte",
                        int(at.max()), self.shared.size)  # fmt: skip
        found = self.shared.views[size, count][place]
        return found[:, 0] if count == 1 else found.T

    def store_shared(self, lanes: Lanes, at: Any, size: int, values: list[Any]) -> None:
        place, grains = self._touch(lanes, at, size * len(values))
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
            part = (
                local.fillings[:, grains] if lanes is self.lanes else local.fillings[lanes, grains]
            )
            if not part.all():
                raise Fault(
                    "read of local memory that the thread did not write, byte", at, local.size
                )
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
