"""PTX text as instructions: what NVRTC writes, one module with its kernels and constant tables."""

import re
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TABLE = re.compile(
    r"^\s*\.(?:global|const)\s+\.align\s+\d+\s+\.[bus](\d+)\s+([\w$]+)\[(\d+)\]\s*=\s*\{([^}]*)\};",
    re.MULTILINE,
)
_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{")
_THREADS = re.compile(r"\.maxntid\s+(\d+)")
_LABEL = re.compile(r"([$\w]+):")
_ROOM = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_OF_LAUNCH = re.compile(r"\.extern\s+\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[\];")
_NUMBERED = re.compile(r"(%[a-zA-Z]+)\d+")
_WORD = re.compile(r"[%$\w]+")
_IGNORED = (".pragma", ".loc", ".file")


@cache
def _parts(name: str) -> list[str]:
    return name.split(".")


@dataclass(frozen=True)
class Instruction:
    """`@guard name operands;`, or a label, which is a name that ends in a colon."""

    name: str
    operands: tuple[str, ...] = ()
    guard: str = ""
    negated: bool = False

    @property
    def parts(self) -> list[str]:
        return _parts(self.name)


@dataclass
class Kernel:
    """A kernel's code; `rooms` are its arrays in shared and local memory, (space, offset), and
    `sizes` how many bytes each space takes; what a launch asks for of shared memory comes last."""

    name: str
    parameters: list[str]
    threads: int
    code: list[Instruction] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)  # b32 of %r
    rooms: dict[str, tuple[str, int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: {"shared": 0, "local": 0})

    def kind(self, register: str) -> str:
        """The type that a register was declared with."""
        numbered = _NUMBERED.fullmatch(register)
        found = self.kinds.get(register) or (self.kinds.get(numbered[1]) if numbered else None)
        if found is None:
            raise NotImplementedError(f"register {register}, which was not declared")
        return found


@dataclass(frozen=True)
class Module:
    kernels: dict[str, Kernel]
    tables: dict[str, NDArray[np.uint8]]


def split(operands: str) -> tuple[str, ...]:
    """By commas that are in no brackets."""
    found, depth, begin = [], 0, 0
    for at, sign in enumerate(operands):
        depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 0:
            found.append(operands[begin:at].strip())
            begin = at + 1
    last = operands[begin:].strip()
    return (*found, last) if last else tuple(found)


def _declare(kernel: Kernel, text: str, scope: dict[str, str], number: int) -> None:
    """.reg .b32 %r<45> or, in a scope of its own, .reg .b16 l, h"""
    _, kind, names = text.split(None, 2)
    for name in names.split(","):
        name = name.strip().partition("<")[0]
        own = name if name.startswith("%") else f"%{name}_{number}"
        scope[name] = own
        kernel.kinds[own] = kind.lstrip(".")


def _instruction(text: str, scopes: list[dict[str, str]]) -> Instruction:
    guard, negated = "", False
    if text.startswith("@"):
        guard, _, text = text[1:].partition(" ")
        negated, guard = guard.startswith("!"), guard.lstrip("!")
    name, *rest = text.strip().split(None, 1)
    operands = rest[0] if rest else ""
    if len(scopes) > 1:
        known = {name: own for scope in scopes for name, own in scope.items()}
        operands = _WORD.sub(lambda found: known.get(found[0], found[0]), operands)
    return Instruction(name, split(operands), guard, negated)


def _body(kernel: Kernel, text: str, at: int) -> None:
    """The code from behind the opening brace to the closing one."""
    scopes: list[dict[str, str]] = [{}]
    number = 0
    while True:
        while text[at].isspace():
            at += 1
        if text[at] == "{":
            number += 1
            scopes.append({})
            at += 1
        elif text[at] == "}":
            scopes.pop()
            at += 1
            if not scopes:
                return
        elif label := _LABEL.match(text, at):
            kernel.code.append(Instruction(label[0]))
            at = label.end()
        else:
            end = text.index(";", at)
            statement, at = text[at:end].strip(), end + 1
            if room := _ROOM.match(statement):
                space, align, size = room[1], int(room[2]), int(room[4])
                begin = -(-kernel.sizes[space] // align) * align
                kernel.rooms[room[3]] = (space, begin)
                kernel.sizes[space] = begin + size
            elif statement.startswith(".reg"):
                _declare(kernel, statement, scopes[-1], number)
            elif statement and not statement.startswith(_IGNORED):
                if statement.startswith("."):
                    raise NotImplementedError(statement)
                kernel.code.append(_instruction(statement, scopes))


def parse(text: str) -> Module:
    """All kernels and tables of a module."""
    tables = {}
    for bits, name, _, numbers in _TABLE.findall(text):
        values = np.fromstring(numbers, np.int64, sep=",")
        tables[name] = values.astype(f"<i{int(bits) // 8}").view(np.uint8)
    text = _COMMENT.sub("", _TABLE.sub("", text))
    kernels = {}
    for found in _ENTRY.finditer(text):
        parameters = [one.split()[-1] for one in found[2].split(",") if one.strip()]
        threads = _THREADS.search(found[3])
        kernel = Kernel(found[1], parameters, int(threads[1]) if threads else 0)
        _body(kernel, text, found.end())
        for align, name in _OF_LAUNCH.findall(text):
            kernel.sizes["shared"] += -kernel.sizes["shared"] % int(align)
            kernel.rooms[name] = ("shared", kernel.sizes["shared"])
        kernels[kernel.name] = kernel
    return Module(kernels, tables)
