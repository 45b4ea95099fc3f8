"""Basic blocks of a kernel: where they go on, which registers live between them, and which of those
may be read before anything has been written."""

import re
from dataclasses import dataclass, field

from support.ptx.parse import Instruction, Kernel

_REGISTER = re.compile(r"%[\w$]+(?:\.[xyz])?")
_WRITES_NOTHING = ("st", "bra", "bar", "ret", "griddepcontrol", "red", "cp", "prefetch", "fence")
EXIT = -1


@dataclass
class Block:
    """Instructions that run one after the other; then `end`: go, if, bar or ret."""

    code: list[Instruction] = field(default_factory=list)
    end: str = "go"
    guard: str = ""  # of if: lanes where it holds (negated: does not) go to `there`
    negated: bool = False
    there: int = EXIT
    next: int = EXIT
    inputs: frozenset[str] = frozenset()  # read before they are written
    written: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()  # written, and read later on


def registers(text: str) -> list[str]:
    """Those that an operand names, special ones left out."""
    return [name for name in _REGISTER.findall(text) if "." not in name and name != "%laneid"]


def _writes_nothing(ins: Instruction) -> bool:
    barrier = ins.name.startswith(("mbarrier.init", "mbarrier.arrive"))
    return barrier or ins.parts[0] in _WRITES_NOTHING


def writes(ins: Instruction) -> list[str]:
    if _writes_nothing(ins) or not ins.operands:
        return []
    return registers(ins.operands[0])


def reads(ins: Instruction) -> list[str]:
    own = ins.operands if _writes_nothing(ins) else ins.operands[1:]
    found = [name for operand in own for name in registers(operand)]
    return [*found, ins.guard] if ins.guard else found


def _blocks(kernel: Kernel) -> list[Block]:
    """A guarded instruction that is no branch becomes a block of its own, which others skip."""
    blocks, labels = [Block()], {}
    targets: list[tuple[Block, str]] = []

    def close() -> None:
        blocks[-1].next = len(blocks)
        blocks.append(Block())

    for ins in kernel.code:
        base = "go" if ins.name == "bar.warp.sync" else ins.parts[0]
        if ins.name.endswith(":"):
            if blocks[-1].code:
                close()
            labels[ins.name[:-1]] = len(blocks) - 1
        elif base == "bra":
            block = blocks[-1]
            block.end = "if" if ins.guard else "go"
            block.guard, block.negated = ins.guard, ins.negated
            close()
            targets.append((block, ins.operands[0]))
        elif ins.guard:
            block = blocks[-1]
            block.end, block.guard, block.negated = "if", ins.guard, not ins.negated
            close()
            blocks[-1].code.append(Instruction(ins.name, ins.operands))
            if base in ("ret", "bar"):
                raise NotImplementedError(f"{ins.name} behind a guard")
            close()
            block.there = len(blocks) - 1
        elif base in ("ret", "bar"):
            if base == "bar" and (ins.name != "bar.sync" or ins.operands != ("0",)):
                raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")
            blocks[-1].end = base
            close()
        else:
            blocks[-1].code.append(ins)
    for block, label in targets:
        if block.end == "go":
            block.next = labels[label]
        else:
            block.there = labels[label]
    return blocks


def following(block: Block) -> list[int]:
    if block.end == "ret":
        return []
    return [block.next, block.there] if block.end == "if" else [block.next]


def _bits(names: frozenset[str], number: dict[str, int]) -> int:
    found = 0
    for name in names:
        found |= 1 << number[name]
    return found


def _live(blocks: list[Block]) -> None:
    """Fills inputs, written and outputs."""
    for block in blocks:
        before: set[str] = set()
        written: set[str] = set()
        for ins in block.code:
            before.update(name for name in reads(ins) if name not in written)
            written.update(writes(ins))
        if block.guard and block.guard not in written:
            before.add(block.guard)
        block.inputs, block.written = frozenset(before), frozenset(written)
    names = sorted({name for block in blocks for name in block.inputs})
    number = {name: k for k, name in enumerate(names)}
    uses = [_bits(block.inputs, number) for block in blocks]
    kills = [_bits(block.written & number.keys(), number) for block in blocks]
    live, changed = list(uses), True
    after = [0] * len(blocks)
    while changed:
        changed = False
        for k in reversed(range(len(blocks))):
            after[k] = 0
            for other in following(blocks[k]):
                after[k] |= live[other] if other < len(blocks) else 0
            now = uses[k] | after[k] & ~kills[k]
            changed |= now != live[k]
            live[k] = now
    for block, bits in zip(blocks, after, strict=True):
        block.outputs = frozenset(
            name for name in block.written if name in number and bits >> number[name] & 1
        )


def _perhaps(blocks: list[Block]) -> frozenset[str]:
    """Registers that some way through the code reads before it writes them."""
    names = sorted({name for block in blocks for name in block.inputs})
    number = {name: k for k, name in enumerate(names)}
    made = [_bits(block.written & number.keys(), number) for block in blocks]
    every = (1 << len(names)) - 1
    given = [every] * len(blocks)
    given[0] = 0
    reached, work = {0}, [0]
    while work:
        k = work.pop()
        out = given[k] | made[k]
        for other in following(blocks[k]):
            if given[other] & ~out or other not in reached:
                given[other] &= out
                reached.add(other)
                work.append(other)
    return frozenset(
        name
        for block, bits in zip(blocks, given, strict=True)
        for name in block.inputs
        if not bits >> number[name] & 1
    )


def flow(kernel: Kernel) -> tuple[list[Block], frozenset[str]]:
    """The blocks of a kernel as its text has them, and the registers that have to be watched."""
    blocks = _blocks(kernel)
    while blocks and not blocks[-1].code and blocks[-1].end == "go":
        blocks.pop()  # behind the last ret
    _live(blocks)
    return blocks, _perhaps(blocks)
