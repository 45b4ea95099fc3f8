"""Barriers in shared memory that count bytes of bulk copies (mbarrier), one phase after the other.

A copy is under way until a thread waits for its phase: nobody may touch where it goes. The phase
ends when all that are to arrive have, and all bytes that they told have come; to wait for one that
cannot end is a fault. Lanes of a warp that wait together come after all that was copied.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.ptx.memory import Memory
from support.ptx.spaces import Fault, Lanes

_PIECE = 16  # bytes that a copy and its places are multiples of


@dataclass
class Barrier:
    count: int
    phase: int = 0
    arrived: int = 0
    expected: int = 0
    bytes: int = 0  # of copies of this phase
    copies: list[tuple[Lanes, Any, Any]] = field(default_factory=list)  # who, where to, what


class Barriers(Memory):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.barriers: dict[tuple[int, int], Barrier] = {}  # by block and place

    def _each(self, lanes: Lanes, *values: Any) -> Any:
        shaped = (np.broadcast_to(np.asarray(value), lanes.shape).tolist() for value in values)
        return zip(self.block[lanes].tolist(), *shaped, strict=True)

    def _at(self, block: int, at: int) -> Barrier:
        if (block, at) not in self.barriers:
            raise Fault("no barrier begins at byte", at, self.shared.size)
        return self.barriers[block, at]

    def begin_barrier(self, lanes: Lanes, at: Any, count: Any) -> None:
        for block, place, number in self._each(lanes, at, count):
            if (block, place) in self.barriers or place % 8:
                raise Fault("a barrier begins twice, or at no multiple of 8, byte",
                            place, self.shared.size)  # fmt: skip
            self.barriers[block, place] = Barrier(number)

    def expect_bytes(self, lanes: Lanes, at: Any, count: Any) -> None:
        for block, place, nbytes in self._each(lanes, at, count):
            barrier = self._at(block, place)
            barrier.arrived += 1
            barrier.expected += nbytes

    def copy_bulk(self, lanes: Lanes, to: Any, at: Any, count: Any, barrier: Any) -> None:
        to, at, count = (np.broadcast_to(np.asarray(v), lanes.shape) for v in (to, at, count))
        if (to % _PIECE).any() or (at % _PIECE).any() or (count % _PIECE).any():
            raise Fault("a bulk copy of no multiple of 16 bytes, to byte",
                        int(to.max()), self.shared.size)  # fmt: skip
        for place in {(block, place) for block, place in self._each(lanes, barrier)}:
            self._at(*place)
        owners = [self._at(*place) for place in self._each(lanes, barrier)]
        for k in range(0, int(count.max()), _PIECE):
            more = k < count
            who, where = lanes[more], to[more] + k
            found = np.atleast_2d(self.load_global(who, at[more] + k, 4, 4, False))
            _, grains = self._touch(who, where, _PIECE)
            self.shared.filled[grains] = False
            self.coming[grains] = True
            for lane in range(len(who)):
                own = owners[int(np.flatnonzero(more)[lane])]
                own.bytes += _PIECE
                own.copies.append((who[lane : lane + 1], where[lane : lane + 1], found[:, lane]))

    def wait_at(self, lanes: Lanes, at: Any, parity: Any) -> Any:
        """Once the phase of that parity is over; always true."""
        self.whole_warps(lanes, "mbarrier.try_wait")
        for block, place, wanted in sorted(set(self._each(lanes, at, parity))):
            barrier = self._at(block, place)
            if barrier.phase % 2 != wanted:
                continue
            if barrier.arrived != barrier.count or barrier.bytes != barrier.expected:
                raise Fault(f"waits for ever at a barrier that {barrier.expected} bytes were told, "
                            "and of which came", barrier.bytes, barrier.expected)  # fmt: skip
            for who, where, found in barrier.copies:
                grains = self.shared.places(self.block[who], where, _PIECE, "copy to")[1]
                self.coming[grains] = False
                self.store_shared(who, where, 4, [found[k : k + 1] for k in range(4)])
            self.barriers[block, place] = Barrier(barrier.count, barrier.phase + 1)
        self.turn[lanes] += 1
        return np.ones(len(lanes), bool)

    def end(self, lanes: Lanes) -> None:
        super().end(lanes)
        for barrier in self.barriers.values():
            for who, *_ in barrier.copies:
                if np.isin(who, lanes).any():
                    raise Fault("a thread ends before its copies have come, number",
                                int(who[0]) % self.threads, self.threads)  # fmt: skip
