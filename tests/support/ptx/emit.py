"""A basic block as a Python function over numpy arrays: one number a lane, or one for all lanes.

    def block_7(m, lanes, r1_u4, f3_f4): ...; return (f9_f4, r2_u4), p1_b

`m` is the machine, `lanes` which threads run. What a register holds has a form for each way to look
at its bits: u4, i4, f4 for 32 bits (bytes, as numpy names them), b for predicates; a form is made
when an instruction first asks for it.
"""

import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from support.ptx import arithmetic
from support.ptx.flow import Block, reads, registers, writes
from support.ptx.parse import Instruction, Kernel

LOCAL, SHARED = 1 << 56, 1 << 57  # where generic addresses of these spaces begin
SPECIAL = ("%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid")
_ADDRESS = re.compile(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]")
# What reads a float as a number, and makes a NaN of any NaN.
_NUMERIC = {"add", "sub", "mul", "fma", "div", "sqrt", "rcp", "setp", "cvt", "min", "max", "mma"}

Rule = Callable[["Writer", Instruction], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """What to write for instructions whose name begins so."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


@cache
def size_of(type_: str) -> int:
    """Bytes of .u32 and its like."""
    return int(re.sub(r"\D.*", "", type_[1:]) or 0) // 8


def whole(text: str) -> int:
    """An immediate; U says that it is unsigned."""
    return int(text.rstrip("U"), 0)


def form_of(type_: str) -> str:
    """How to look at .s32: i4."""
    if type_ == "pred":
        return "b"
    return {"u": "u", "b": "u", "s": "i", "f": "f"}[type_[0]] + str(size_of(type_))


def bits_of(type_: str) -> str:
    return f"u{size_of(type_)}"


def strict(ins: Instruction, *allowed: str) -> None:
    """Refuses modifiers that a rule does not know."""
    for part in ins.parts[1:]:
        if part not in allowed:
            raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")


class Writer:
    """Lines of the function of one block, and the constants that they name."""

    def __init__(self, kernel: Kernel, tables: dict[str, int], homes: dict[str, str]) -> None:
        self.kernel, self.tables, self.homes = kernel, tables, homes
        self.constants: dict[str, Any] = {}
        self.begin(Block())

    def begin(self, block: Block) -> None:
        self.lines: list[str] = []
        self.forms: dict[str, dict[str, str]] = {}
        self.count = 0
        self.outputs = block.outputs
        self.consumers: dict[str, set[str]] = {}
        for ins in block.code:
            for name in reads(ins):
                self.consumers.setdefault(name, set()).add(ins.parts[0])

    def line(self, text: str) -> None:
        self.lines.append(text)

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def constant(self, value: Any) -> str:
        """A numpy number, by name."""
        name = f"K{value.dtype.kind}{value.dtype.itemsize}_{value.tobytes().hex()}"
        self.constants[name] = value
        return name

    def size(self, register: str) -> int:
        kind = self.kernel.kind(register)
        return 0 if kind == "pred" else size_of(kind)

    def immediate(self, text: str, form: str) -> str:
        if form == "b":
            return self.constant(np.bool_(whole(text) != 0))
        size = int(form[1:])
        if text[:2] in ("0f", "0F", "0d", "0D"):
            raw = bytes.fromhex(text[2:])[::-1]
            if len(raw) != size:
                raise NotImplementedError(f"{text} as {form}")
        else:
            raw = struct.pack("<Q", whole(text) % (1 << 64))[:size]
        return self.constant(np.frombuffer(raw, form)[0])

    def use(self, text: str, form: str) -> str:
        """An operand in a form; of a wider register its low bytes."""
        if text in SPECIAL:
            text_form = f"m.special[{text!r}][lanes]"
            return text_form if form == "u4" else f"{text_form}.astype({form})"
        if not text.startswith("%"):
            if text in self.tables or text in self.kernel.rooms:
                return self.constant(np.uint64(self.symbol(text)))
            return self.immediate(text, form)
        forms = self.forms[text]
        if form in forms:
            return forms[form]
        size = self.size(text)
        if form == "b" or size == 0:
            raise NotImplementedError(f"{text} as {form}")
        wanted = int(form[1:])
        if wanted == size:
            forms[form] = self.keep(f"{next(iter(forms.values()))}.view({form})")
        elif wanted < size:
            low = self.keep(f"{self.use(text, f'u{size}')}.astype(u{wanted})")
            forms[form] = low if form[0] == "u" else self.keep(f"{low}.view({form})")
        else:
            raise NotImplementedError(f"{text} of {size} bytes as {form}")
        return forms[form]

    def symbol(self, name: str) -> int:
        return self.kernel.rooms[name][1] if name in self.kernel.rooms else self.tables[name]

    def keep(self, expression: str) -> str:
        name = self.new()
        self.line(f"{name} = {expression}")
        return name

    def define(self, register: str, expression: str, form: str) -> None:
        """A register's new value; a wider register is filled up as the form's sign says."""
        size = self.size(register)
        if form != "b" and int(form[1:]) != size:
            if int(form[1:]) > size:
                raise NotImplementedError(f"{form} into {register} of {size} bytes")
            form, old = f"{form[0]}{size}", form
            if form[0] == "f":
                raise NotImplementedError(f"{old} into {register} of {size} bytes")
            expression = f"({expression}).astype({form})"
        self.forms[register] = {form: self.keep(expression)}

    def number(self, register: str, expression: str, form: str) -> None:
        """The float that an operation makes; a NaN is PTX's own where its bits can be seen."""
        seen = register in self.outputs or self.consumers.get(register, set()) - _NUMERIC
        self.define(register, f"nan_{form}({expression})" if seen else expression, form)

    def address(self, text: str) -> str:
        """[register + offset], in bytes."""
        found = _ADDRESS.fullmatch(text)
        if not found:
            raise NotImplementedError(text)
        base, more = found[1], whole(found[2] or "0")
        if not base.startswith("%"):
            return self.constant(np.uint64(self.symbol(base) + more))
        if self.size(base) == 4:  # of shared memory
            at = self.keep(f"{self.use(base, 'u4')}.astype(u8)")
        else:
            at = self.use(base, "u8")
        return self.keep(f"{at} + {self.constant(np.uint64(more % (1 << 64)))}") if more else at


def _home(kernel: Kernel, blocks: list[Block]) -> dict[str, str]:
    """The form in which a register is kept between blocks: a float if one is first put into it."""
    homes: dict[str, str] = {}
    for block in blocks:
        for ins in block.code:
            for name in writes(ins):
                kind = kernel.kind(name)
                if kind == "pred":
                    homes[name] = "b"
                elif name not in homes or homes[name][0] == "u":
                    floats = (
                        kind[0] == "f" or f"f{size_of(kind) * 8}" in ins.parts[1:2] + ins.parts[-1:]
                    )
                    floats &= ins.parts[0] != "setp"
                    homes[name] = f"{'f' if floats else 'u'}{size_of(kind)}"
    return homes


class Code:
    """A kernel's blocks as functions, each written when it is first run."""

    def __init__(self, kernel: Kernel, blocks: list[Block], tables: dict[str, int]) -> None:
        self.blocks = blocks
        self.homes = _home(kernel, blocks)
        self.inputs = [sorted(block.inputs) for block in blocks]
        self.outputs = [sorted(block.outputs) for block in blocks]
        self._writer = Writer(kernel, tables, self.homes)
        self._made: dict[int, Callable[..., Any]] = {}
        self.noise = self._noise()

    def _noise(self) -> dict[str, Any]:
        """What registers hold that no instruction writes: a compiler reads some of them, of which
        nothing comes. No result may depend on it."""
        found = {}
        for name in {name for names in self.inputs for name in names} - self.homes.keys():
            size = self._writer.size(name)
            found[name] = np.frombuffer(b"\xa5" * size, f"u{size}")[0] if size else np.bool_(True)
        return found

    def text(self, number: int) -> str:
        block, writer = self.blocks[number], self._writer
        writer.begin(block)
        arguments = []
        for k, name in enumerate(self.inputs[number]):
            form = self.homes.get(name, f"u{writer.size(name)}" if writer.size(name) else "b")
            arguments.append(f"a{k}")
            writer.forms[name] = {form: f"a{k}"}
        for ins in block.code:
            found = RULES.get(ins.parts[0])
            if found is None:
                raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")
            found(writer, ins)
        results = [writer.use(name, self.homes[name]) for name in self.outputs[number]]
        guard = writer.use(block.guard, "b") if block.guard else "None"
        last = f"return ({', '.join(results)}{',' * (len(results) == 1)}), {guard}"
        head = f"def block_{number}({', '.join(['m', 'lanes', *arguments])}):"
        return "\n    ".join([head, *writer.lines, last])

    def block(self, number: int) -> Callable[..., Any]:
        if number not in self._made:
            text = self.text(number)
            names: dict[str, Any] = {**arithmetic.NAMES, **self._writer.constants}
            exec(compile(text, f"<{self._writer.kernel.name}>", "exec"), names)
            self._made[number] = names[f"block_{number}"]
        return self._made[number]


__all__ = ["LOCAL", "RULES", "SHARED", "Code", "Writer", "registers", "rule", "strict"]
