"""A warp that runs machine code of sm_90, to see what it issues and which memory it asks for.

The text of `cuobjdump -sass` is executed for the 32 threads of one warp: integers and predicates as
the hardware has them, floats nearly so (no result is looked at), loads give random bits or what
`memory` says. Threads that part meet again where the code says so (BSSY, BSYNC). Other warps and
blocks do not exist: what they would have left in shared memory reads as zero.

Instructions that the kernels here do not use are unknown and raise. What is told in the end is a
count, not a time.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 32
U32 = np.uint32
Words = NDArray[np.uint32]
Mask = NDArray[np.bool_]
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[(?:(U?R\w+)\+?)?(?:0x([0-9a-f]+))?\]")
_ADDRESS = re.compile(r"(?:desc\[\w+\])?\[([\w.+-]*)\]")
_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
PARAMETERS = 0x210  # where they begin in constant bank 0
_STACK = 1 << 15


@dataclass(frozen=True)
class Instruction:
    at: int
    guard: str
    name: str  # before the first dot
    flags: tuple[str, ...]
    operands: tuple[str, ...]


def read(text: str) -> dict[int, Instruction]:
    """The instructions of one kernel by their addresses."""
    found = {}
    for at, guard, opcode, rest in _LINE.findall(text):
        name, *flags = opcode.split(".")
        operands = tuple(part.strip() for part in rest.split(",")) if rest else ()
        number = int(at, 16)
        found[number] = Instruction(number, guard, name, tuple(flags), operands)
    return found


@dataclass(frozen=True)
class Access:
    """A warp's load or store: bytes of a thread, threads, distinct bytes, sectors of 32 bytes, and
    passes over the banks of shared memory."""

    kind: str  # LDG, STG, LDS, STS, LDL, STL, ...
    width: int
    threads: int
    distinct: int
    sectors: int
    passes: int


@dataclass
class Seen:
    """What a warp did."""

    issued: Counter[str] = field(default_factory=Counter)  # by name
    accesses: list[Access] = field(default_factory=list)
    trips: int = 0  # waits for memory that was asked for since the last of them
    in_flight: int = 0  # bytes asked for, distinct ones of the warp, when most were waited for
    early: int = 0  # the same, before it first waits for the kernels before


def _floats(words: Words) -> NDArray[np.float32]:
    return words.view(np.float32)


class Warp:
    """`special`: values of S2R by name, numbers or arrays of 32; others are zero. `memory(address,
    bytes)`: the words [4, 32] that a load finds, or None for random ones."""

    def __init__(
        self,
        code: dict[int, Instruction],
        parameters: bytes,
        special: dict[str, Any],
        memory: Callable[[NDArray[np.uint64], int], Words | None] = lambda *_: None,
    ) -> None:
        self.code, self.special, self.memory = code, special, memory
        self.bank = bytearray(PARAMETERS) + parameters
        self.bank[0x28:0x2C] = _STACK.to_bytes(4, "little")
        self.registers = np.zeros((256, LANES), U32)
        self.uniform = np.zeros((64, LANES), U32)
        self.predicates = np.zeros((8, LANES), bool)
        self.uniform_predicates = np.zeros((8, LANES), bool)
        self.shared = np.zeros(1 << 18, np.uint8)
        self.local = np.zeros((LANES, _STACK), np.uint8)
        self.barriers: dict[str, Mask] = {}
        self.random = np.random.default_rng(0)
        self.seen = Seen()
        self._loads: dict[int, tuple[int, int]] = {}  # register: epoch, bytes
        self._outstanding = 0

    # Operands.

    def _base(self, name: str) -> Words:
        if name in ("RZ", "URZ", "SRZ"):
            return np.zeros(LANES, U32)
        if name.startswith("UR"):
            return self.uniform[int(name[2:])]
        if name.startswith("R") and name[1:].isdigit():
            return self.registers[int(name[1:])]
        raise NotImplementedError(name)

    def constant(self, bank: int, offset: int) -> int:
        if bank != 0:
            return 0x70000000 + offset
        return int.from_bytes(self.bank[offset : offset + 4].ljust(4, b"\0"), "little")

    def word(self, text: str, high: int = 0) -> Words:
        """An operand as bits; high: the register after it, for pairs."""
        text = text.replace(".reuse", "").replace(".64", "").split(".H")[0]
        if text[0] == "~":
            return ~self.word(text[1:], high)
        if text[0] == "-" and text[1] in "RUc|":
            return self.word(text[1:], high)
        if text[0] == "|":
            return self.word(text.strip("|"), high)
        if found := _CONSTANT.fullmatch(text):
            bank, register, offset = found.groups()
            at = int(offset or "0", 16) + 4 * high
            if register:
                places = self._base(register).astype(np.int64) + at
                return np.array([self.constant(int(bank, 16), int(p)) for p in places], U32)
            return np.full(LANES, self.constant(int(bank, 16), at), U32)
        if text[0] in "RU" and text not in ("RZ", "URZ"):
            kind = "UR" if text.startswith("UR") else "R"
            return self._base(f"{kind}{int(text[len(kind) :]) + high}")
        if text in ("RZ", "URZ", "SRZ"):
            return np.zeros(LANES, U32)
        return np.full(LANES, self._immediate(text) if not high else 0, U32)

    def _immediate(self, text: str) -> int:
        if re.fullmatch(r"-?0x[0-9a-f]+|-?\d+", text) and not self._as_float:
            return int(text, 0) & 0xFFFFFFFF
        value = text.replace("QNAN", "nan").replace("INF", "inf")
        if value.startswith("0x"):
            return int(value, 16)
        return int(np.float32(float(value)).view(U32))

    _as_float = False

    def number(self, text: str) -> NDArray[np.float32]:
        """An operand of an instruction of floats, with its signs."""
        self._as_float = True
        try:
            plain = text.lstrip("-").strip("|") if text[0] in "-|" and text[1:2] in "RUc|" else text
            found = _floats(self.word(plain).copy())
        finally:
            self._as_float = False
        if "|" in text:
            found = np.abs(found)
        return -found if plain is not text and text[0] == "-" else found

    def integer(self, text: str, high: int = 0) -> NDArray[np.int64]:
        """An operand with its sign, as a number below 2^32 before it."""
        value = self.word(text, high).astype(np.int64)
        return -value if text[0] == "-" and text[1] in "RUc" else value

    def wide(self, text: str) -> NDArray[np.uint64]:
        low, high = self.word(text), self.word(text, 1)
        return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)

    def predicate(self, text: str) -> Mask:
        name = text.lstrip("!")
        if name in ("PT", "UPT"):
            found = np.ones(LANES, bool)
        elif name.startswith("UP"):
            found = self.uniform_predicates[int(name[2:])]
        else:
            found = self.predicates[int(name[1:])]
        return ~found if text.startswith("!") else found

    def put(self, text: str, value: Any, active: Mask, high: int = 0) -> None:
        name = text.replace(".reuse", "").split(".")[0]
        if name in ("RZ", "URZ"):
            return
        uniform = name.startswith("UR")
        place = int(name[2 if uniform else 1 :]) + high
        bits = (np.asarray(value).astype(np.int64) & 0xFFFFFFFF).astype(U32)
        row = self.uniform[place] if uniform else self.registers[place]
        row[active] = np.broadcast_to(bits, LANES)[active]
        if not uniform:
            self._loads.pop(place, None)

    def put_float(self, text: str, value: NDArray[Any], active: Mask) -> None:
        self.put(text, value.astype(np.float32).view(U32), active)

    def put_predicate(self, text: str, value: Mask, active: Mask) -> None:
        if text in ("PT", "UPT"):
            return
        table = self.uniform_predicates if text.startswith("UP") else self.predicates
        table[int(text.lstrip("UP"))][active] = value[active]

    # Memory.

    def _address(self, text: str) -> NDArray[np.uint64]:
        found = _ADDRESS.fullmatch(text)
        assert found, text
        total = np.zeros(LANES, np.uint64)
        for part in found[1].split("+"):
            if not part:
                continue
            if part.endswith(".64"):
                total = total + self.wide(part)
            elif part[0] in "RU":
                own = self.word(part.split(".")[0])
                total = total + own.astype(np.int32).astype(np.int64).astype(np.uint64)
            else:
                total = total + np.uint64(int(part, 0) & (2**64 - 1))
        return total

    def _access(self, ins: Instruction, place: str, active: Mask) -> tuple[int, NDArray[np.uint64]]:
        width = next((_WIDTH[flag] for flag in ins.flags if flag in _WIDTH), 4)
        where = self._address(place)
        if not active.any():
            return width, where
        own = where[active]
        lines = np.unique((own[:, None] + np.arange(width, dtype=np.uint64)).ravel())
        sectors = len(np.unique(lines >> np.uint64(5)))
        passes = 0
        if ins.name in ("LDS", "STS"):
            group = LANES * 4 // max(width, 4)  # threads of one pass
            for first in range(0, len(own), group):
                words = np.unique(own[first : first + group] >> np.uint64(2))
                words = np.unique(words[:, None] + np.arange(max(width // 4, 1), dtype=np.uint64))
                passes += int(np.bincount((words % np.uint64(32)).astype(int)).max())
        name = ins.name
        if name in ("LD", "ST"):  # generic: its own arrays lie at the bottom
            name += "L" if int(own.max()) < _STACK else "G"
        kept = Access(name, width, int(active.sum()), len(lines), sectors, passes)
        self.seen.accesses.append(kept)
        return width, where

    def _load(self, ins: Instruction, active: Mask) -> None:
        width, where = self._access(ins, ins.operands[1], active)
        words = np.zeros((4, LANES), U32)
        kind = self.seen.accesses[-1].kind if active.any() else ins.name
        if kind == "LDG":
            told = self.memory(where, width)
            fresh = self.random.integers(0, 1 << 32, (4, LANES), np.uint64).astype(U32)
            words = fresh if told is None else told
        else:
            for lane in np.flatnonzero(active):
                memory = self.shared if ins.name == "LDS" else self.local[lane]
                raw = memory[int(where[lane]) : int(where[lane]) + width]
                words[:, lane] = np.frombuffer(raw.tobytes().ljust(16, b"\0"), U32)
        if width < 4:
            words[0] &= U32((1 << (8 * width)) - 1)
            if "S8" in ins.flags or "S16" in ins.flags:
                shift = 32 - 8 * width
                words[0] = (words[0] << U32(shift)).astype(np.int32) >> shift
        for k in range(max(width // 4, 1)):
            self.put(ins.operands[0], words[k], active, k)
        if kind == "LDG" and active.any():
            self._outstanding += self.seen.accesses[-1].distinct
            first = int(ins.operands[0].lstrip("R")) if ins.operands[0] != "RZ" else -1
            for k in range(max(width // 4, 1)):
                self._loads[first + k] = (self.seen.trips, 0)

    def _store(self, ins: Instruction, active: Mask) -> None:
        width, where = self._access(ins, ins.operands[0], active)
        if not active.any() or self.seen.accesses[-1].kind == "STG":
            return
        count = max(width // 4, 1)
        rows = [self.word(ins.operands[1], k) for k in range(count)]
        for lane in np.flatnonzero(active):
            memory = self.shared if ins.name == "STS" else self.local[lane]
            raw = b"".join(int(row[lane]).to_bytes(4, "little") for row in rows)[:width]
            at = int(where[lane])
            memory[at : at + width] = np.frombuffer(raw, np.uint8)

    def _waits(self, ins: Instruction) -> None:
        """Whether it needs what a load has not brought yet."""
        for text in ins.operands[0 if ins.name[:2] == "ST" else 1 :]:
            for name in re.findall(r"(?<!U)\bR(\d+)", text):
                pending = [
                    self._loads.get(int(name) + k) for k in range(1 + 3 * ("ST" in ins.name))
                ]
                if any(load and load[0] == self.seen.trips for load in pending):
                    self.seen.trips += 1
                    self.seen.in_flight = max(self.seen.in_flight, self._outstanding)
                    self._outstanding = 0
                    self._loads.clear()
                    return

    # Running.

    def run(self, most: int = 3_000_000) -> Seen:
        import sass_floats  # noqa: F401 (adds to OPCODES)
        from sass_opcodes import OPCODES

        at = np.full(LANES, min(self.code), np.int64)
        running, blocked = np.ones(LANES, bool), np.zeros(LANES, bool)
        for _ in range(most):
            ready = running & ~blocked
            if not ready.any():
                if not running.any():
                    return self.seen
                blocked[:] = False
                at[running] += 16
                continue
            now = int(at[ready].min())
            here = ready & (at == now)
            ins = self.code[now]
            active = here & self.predicate(ins.guard) if ins.guard else here
            if ins.name == "ACQBULK" and not self.seen.issued[ins.name]:
                self.seen.early = sum(a.distinct for a in self.seen.accesses if a.kind == "LDG")
            self.seen.issued[ins.name] += 1
            self._waits(ins)
            following = np.full(LANES, now + 16, np.int64)
            if ins.name in ("BRA", "EXIT", "BSSY", "BSYNC", "CALL", "RET", "BREAK"):
                self._control(ins, now, active, following, running, blocked)
            elif ins.name in ("LDG", "LDS", "LDL", "LD"):
                self._load(ins, active)
            elif ins.name in ("STG", "STS", "STL", "ST"):
                self._store(ins, active)
            else:
                with np.errstate(all="ignore"):
                    OPCODES[ins.name](self, ins, active)
            moved = here & running & ~blocked
            at[moved] = following[moved]
            for name, mask in list(self.barriers.items()):
                waiting = blocked & (self._waiting_on == name)
                if waiting.any() and not (mask & running & ~waiting).any():
                    blocked[waiting] = False
                    at[waiting] += 16
                    del self.barriers[name]
        raise RuntimeError(f"more than {most} instructions")

    _waiting_on = np.full(LANES, "", dtype="<U4")

    def _control(
        self,
        ins: Instruction,
        now: int,
        active: Mask,
        following: NDArray[np.int64],
        running: Mask,
        blocked: Mask,
    ) -> None:
        if ins.name == "BRA":
            *more, target = ins.operands
            for text in more:
                active = active & self.predicate(text)
            following[active] = int(target, 16)
        elif ins.name == "EXIT":
            running[active] = False
        elif ins.name == "BSSY":
            self.barriers[ins.operands[0]] = active.copy()
        elif ins.name == "BREAK":
            name = ins.operands[-1]
            self.barriers[name] = self.barriers[name] & ~active
        elif ins.name == "BSYNC":
            if ins.operands[0] in self.barriers:
                self._waiting_on = self._waiting_on.copy()
                self._waiting_on[active] = ins.operands[0]
                blocked[active] = True
        elif ins.name == "CALL":
            following[active] = int(ins.operands[-1], 16)
        elif ins.name == "RET":
            where = self.wide(ins.operands[0]).astype(np.int64)
            following[active] = where[active]
