"""A grid of threads that run a kernel's PTX: lanes of numpy's arrays are the threads of as many
blocks as fit, each at a basic block of its own. The lanes that are furthest back in the code go on,
so that threads meet again where the code does.

bar.sync lets a block's threads go on when all have come; a thread that has ended never comes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.ptx import rules_float, rules_integer, tensor
from support.ptx.arithmetic import Unspecified
from support.ptx.arrays import Array, Order, begin_of
from support.ptx.barriers import Barriers
from support.ptx.emit import Code
from support.ptx.flow import flow
from support.ptx.parse import Kernel, Module
from support.ptx.rules_memory import space_of
from support.ptx.spaces import Fault

__all__ = ["Compiled", "Fault", "Grid", "compiled", "rules_float", "rules_integer", "run"]

MOST_LANES = 4096
MOST_STEPS = 10_000_000
HOPPER, AMPERE = (25, 16), (24, 8)  # bits and columns of a tensor core: kernels/cuda/tensor.h


@dataclass(frozen=True)
class Compiled:
    kernel: Kernel
    code: Code
    watched: frozenset[str]  # registers that may be read before they were written
    tables: list[Array]
    grains: dict[str, int]  # bytes of the narrowest access of each space


@dataclass(frozen=True)
class Grid:
    blocks: tuple[int, int]
    threads: int
    core: tuple[int, int] = HOPPER
    waits: bool = False  # whether every thread has to wait for the kernels before
    shared: int = 0  # bytes of shared memory that the launch asks for


def _grains(kernel: Kernel) -> dict[str, int]:
    """Accesses that do not say their space may be of any."""
    from support.ptx.emit import size_of

    found = dict.fromkeys(("global", "shared", "local"), 16)
    for ins in kernel.code:
        if ins.parts[:2] == ("cp", "async") and len(ins.operands) > 1:
            found["shared"] = min(found["shared"], int(ins.operands[2]))
        elif ins.parts[0] in ("ld", "st", "atom") and "param" not in ins.parts:
            space = space_of(ins)
            if space == "global" and ins.parts[0] == "ld":
                continue  # notes are of what is written
            for name in found if space == "generic" else (space,):
                found[name] = min(found[name], size_of(ins.parts[-1]))
    return found


def compiled(module: Module, name: str, most_arrays: int) -> Compiled:
    """A kernel whose tables lie behind the arrays of a task."""
    kernel = module.kernels[name]
    named = {word for ins in kernel.code for text in ins.operands for word in [text.strip("[]")]}
    tables, places = [], {}
    for table, values in module.tables.items():
        if any(word.partition("+")[0] == table for word in named):
            places[table] = begin_of(most_arrays + len(tables))
            tables.append(Array(table, values))
    blocks, watched = flow(kernel)
    code = Code(kernel, blocks, places)
    return Compiled(kernel, code, watched & code.homes.keys(), tables, _grains(kernel))


class Machine(Barriers):
    """Some blocks of a grid, from number `begin` on."""

    def __init__(
        self,
        own: Compiled,
        grid: Grid,
        begin: int,
        blocks: int,
        arrays: list[Array],
        parameters: list[np.uint64],
        order: Order,
    ) -> None:
        sizes = own.kernel.sizes
        sizes = {**sizes, "shared": sizes["shared"] + grid.shared}
        super().__init__(arrays, blocks, grid.threads, begin * grid.threads, order,
                         sizes, own.grains, grid.waits)  # fmt: skip
        self.own, self.core, self.parameters = own, grid.core, parameters
        thread = (self.lanes % grid.threads).astype(np.uint32)
        number = (self.block + begin).astype(np.uint32)
        zero = np.zeros_like(thread)
        self.special = {
            "%tid.x": thread, "%tid.y": zero, "%tid.z": zero, "%laneid": thread % np.uint32(32),
            "%ctaid.x": number % np.uint32(grid.blocks[0]),
            "%ctaid.y": number // np.uint32(grid.blocks[0]), "%ctaid.z": zero,
        }  # fmt: skip
        self.values: dict[str, Any] = dict(own.code.noise)
        self.mine: set[str] = set()  # whose arrays are nobody else's
        self.defined: dict[str, NDArray[np.bool_]] = {}

    def multiply(self, lanes: Any, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
        """mma, by whole warps."""
        self.whole_warps(lanes, "mma.sync")
        full = [[np.broadcast_to(x, lanes.shape) for x in own] for own in (a, b, c)]
        fraction, columns = self.core
        return tensor.multiply(*full, fraction, min(columns, 8 * len(b)))

    def _read(self, name: str, lanes: Any, full: bool) -> Any:
        value = self.values.get(name)
        if value is None or (name in self.own.watched and not self.defined[name][lanes].all()):
            raise Fault(f"register {name} is read that was never written, lane", int(lanes[0]), 0)
        if value.ndim == 0:
            return value
        if full:
            self.mine.discard(name)
            return value
        return value[lanes]

    def _write(self, name: str, value: Any, lanes: Any, full: bool) -> None:
        if name in self.own.watched:
            self.defined.setdefault(name, np.zeros(len(self.lanes), bool))[lanes] = True
        if full:
            self.values[name] = value
            self.mine.discard(name)
            return
        if name not in self.mine:
            old = self.values.get(name)
            if old is None:
                old = value.dtype.type(0)
            self.values[name] = np.array(np.broadcast_to(old, self.lanes.shape))
            self.mine.add(name)
        self.values[name][lanes] = value

    def run(self) -> None:
        """Until all threads have ended."""
        code = self.own.code
        ready: dict[int, list[Any]] = {0: [self.lanes]}
        waiting: dict[int, list[Any]] = {}
        for _ in range(MOST_STEPS):
            if not ready:
                if not waiting:
                    return
                ready, waiting = self._meet(waiting), {}
            number = min(ready)
            parts = ready.pop(number)
            lanes = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
            if full := len(lanes) == len(self.lanes):
                lanes = self.lanes
            block = code.blocks[number]
            given = [self._read(name, lanes, full) for name in code.inputs[number]]
            results, guard = code.block(number)(self, lanes, *given)
            for name, value in zip(code.outputs[number], results, strict=True):
                self._write(name, value, lanes, full)
            if self.waits and block.end in ("ret", "bar") and not self.waited[lanes].all():
                # Before its first barrier, as the emulated grid asks.
                lane = int(lanes[np.argmin(self.waited[lanes])]) % self.threads
                what = "a thread does not wait for the kernels before, number"
                raise Fault(what, lane, self.threads)
            if block.end == "ret":
                self.end(lanes)
                continue
            if block.end == "if":
                yes = ~guard if block.negated else guard
                count = np.count_nonzero(yes)
                if yes.ndim == 0 or count in (0, len(lanes)):
                    ready.setdefault(block.there if count else block.next, []).append(lanes)
                else:
                    ready.setdefault(block.there, []).append(lanes[yes])
                    ready.setdefault(block.next, []).append(lanes[~yes])
            else:
                queue = waiting if block.end == "bar" else ready
                queue.setdefault(block.next, []).append(lanes)
        raise Fault("a thread does not end after steps", MOST_STEPS, MOST_STEPS)

    def _meet(self, waiting: dict[int, list[Any]]) -> dict[int, list[Any]]:
        """Blocks whose threads all wait at one barrier go on."""
        for parts in waiting.values():
            there = np.bincount(self.block[np.concatenate(parts)], minlength=len(self.phase))
            some = (there > 0) & (there < self.threads)
            if some.any():
                block = int(np.argmax(some))
                raise Fault("a barrier that not all threads of a block reach, threads",
                            int(there[block]), self.threads)  # fmt: skip
            self.phase += (there > 0).astype(np.int32)
        return waiting


def run(own: Compiled, grid: Grid, arrays: list[Array], parameters: list[int]) -> str | None:
    """Runs all blocks; what the first access was that is not allowed. Parameters that are addresses
    are those of arrays: begin_of."""
    blocks = grid.blocks[0] * grid.blocks[1]
    if own.kernel.threads not in (0, grid.threads):
        return f"{grid.threads} threads a block are not the kernel's {own.kernel.threads}"
    given = [np.uint64(value % (1 << 64)) for value in parameters]
    order = Order(0, np.zeros(blocks, np.int64), np.zeros(blocks, np.int32))
    each = max(1, MOST_LANES // grid.threads)
    try:
        with np.errstate(all="ignore"):
            for begin in range(0, blocks, each):
                count = min(each, blocks - begin)
                Machine(own, grid, begin, count, arrays, given, order).run()
    except (Fault, Unspecified) as fault:
        return str(fault)
    return None
