"""Instructions on integers, bits and predicates, and those that move any number."""

from support.ptx.emit import (
    LOCAL,
    SHARED,
    SPECIAL,
    Writer,
    bits_of,
    form_of,
    rule,
    size_of,
    strict,
    whole,
)
from support.ptx.parse import Instruction, split

INTEGERS = [f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64)]
BITS = ["b16", "b32", "b64"]
FLOATS = ["f32", "f64"]
_SIGNS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def integer_sum(w: Writer, ins: Instruction) -> None:
    strict(ins, *INTEGERS)
    form = bits_of(ins.parts[-1])
    to, a, b = ins.operands
    w.define(to, f"{w.use(a, form)} {_SIGNS[ins.parts[0]]} {w.use(b, form)}", form)


@rule("and", "or", "xor")
def _logic(w: Writer, ins: Instruction) -> None:
    strict(ins, *BITS, "pred")
    form = form_of(ins.parts[-1])
    to, a, b = ins.operands
    w.define(to, f"{w.use(a, form)} {_SIGNS[ins.parts[0]]} {w.use(b, form)}", form)


@rule("not")
def _not(w: Writer, ins: Instruction) -> None:
    strict(ins, *BITS, "pred")
    form = form_of(ins.parts[-1])
    w.define(ins.operands[0], f"~{w.use(ins.operands[1], form)}", form)


def integer_negative(w: Writer, ins: Instruction) -> None:
    strict(ins, *INTEGERS)
    form = bits_of(ins.parts[-1])
    w.define(ins.operands[0], f"~{w.use(ins.operands[1], form)} + {form}.type(1)", form)


def integer_product(w: Writer, ins: Instruction) -> None:
    """mul and mad: lo, hi, or wide."""
    strict(ins, "lo", "hi", "wide", *INTEGERS)
    which, type_ = ins.parts[1:]
    form, to = form_of(type_), ins.operands[0]
    a, b = (w.use(name, form) for name in ins.operands[1:3])
    double = f"{form[0]}{2 * size_of(type_)}"
    if which == "lo":
        form = bits_of(type_)
        a, b = (w.use(name, form) for name in ins.operands[1:3])
        found = f"{a} * {b}"
    elif size_of(type_) == 8:
        raise NotImplementedError(ins.name)
    elif which == "wide":
        found, form = f"({a}.astype({double}) * {b}.astype({double})).view(u{double[1:]})", ""
        form = f"u{double[1:]}"
    else:
        shift = f"{double}.type({8 * size_of(type_)})"
        found = f"({a}.astype({double}) * {b}.astype({double}) >> {shift}).astype({form})"
    if ins.parts[0] == "mad":
        if which == "hi":
            raise NotImplementedError(ins.name)
        found = f"{found} + {w.use(ins.operands[3], form)}"
    w.define(to, found, form)


rule("mad")(integer_product)


def integer_quotient(w: Writer, ins: Instruction) -> None:
    strict(ins, *INTEGERS)
    form = form_of(ins.parts[-1])
    to, a, b = ins.operands
    name = {"div": "quotient", "rem": "remainder"}[ins.parts[0]]
    w.define(to, f"{name}({w.use(a, form)}, {w.use(b, form)})", form)


rule("rem")(integer_quotient)


@rule("shl", "shr")
def _shift(w: Writer, ins: Instruction) -> None:
    """The amount is of 32 bits, and clamped."""
    strict(ins, *INTEGERS, *BITS)
    form = form_of(ins.parts[-1])
    to, a, amount = ins.operands
    value = w.use(a, form)
    left = ins.parts[0] == "shl"
    if amount.startswith("%"):
        name = "shift_left" if left else "shift_right"
        return w.define(to, f"{name}({value}, {w.use(amount, 'u4')})", form)
    by, bits = whole(amount), 8 * size_of(ins.parts[-1])
    if by >= bits and (left or form[0] == "u"):
        return w.define(to, f"{value} & {form}.type(0)", form)
    by = min(by, bits - 1)
    return w.define(to, f"{value} {'<<' if left else '>>'} {w.immediate(str(by), form)}", form)


@rule("bfe")
def _extract(w: Writer, ins: Instruction) -> None:
    strict(ins, "u32")
    to, a, at, count = ins.operands
    position, length = whole(at), whole(count)
    if not 0 < position + length <= 32:
        raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")
    value = f"{w.use(a, 'u4')} >> {w.immediate(at, 'u4')}"
    w.define(to, f"{value} & {w.immediate(str((1 << length) - 1), 'u4')}", "u4")


@rule("bfi")
def _insert(w: Writer, ins: Instruction) -> None:
    strict(ins, "b32", "b64")
    form = bits_of(ins.parts[-1])
    to, a, b, at, count = ins.operands
    position, length = whole(at), whole(count)
    if not 0 < position + length <= 8 * int(form[1:]):
        raise NotImplementedError(f"{ins.name} {', '.join(ins.operands)}")
    mask = (1 << length) - 1 << position
    inner = f"{w.use(a, form)} << {w.immediate(at, form)} & {w.immediate(str(mask), form)}"
    w.define(to, f"{w.use(b, form)} & {w.immediate(str(~mask), form)} | {inner}", form)


@rule("clz")
def _zeros(w: Writer, ins: Instruction) -> None:
    strict(ins, "b32")
    w.define(ins.operands[0], f"leading_zeros({w.use(ins.operands[1], 'u4')})", "u4")


@rule("lop3")
def _any_logic(w: Writer, ins: Instruction) -> None:
    """Bit 4 a + 2 b + c of the table is the result for bits a, b and c."""
    strict(ins, "b32")
    to, a, b, c, table = ins.operands
    names = [w.use(name, "u4") for name in (a, b, c)]
    terms = []
    for k in range(8):
        if whole(table) >> k & 1:
            signs = ["" if k >> (2 - n) & 1 else "~" for n in range(3)]
            terms.append(" & ".join(sign + name for sign, name in zip(signs, names, strict=True)))
    if whole(table) == 0xEA:
        terms = [f"{names[0]} & {names[1]}", names[2]]
    elif whole(table) == 0xC0:
        terms = [f"{names[0]} & {names[1]}"]
    w.define(to, " | ".join(terms) or f"{names[0]} & {w.immediate('0', 'u4')}", "u4")


@rule("prmt")
def _permute(w: Writer, ins: Instruction) -> None:
    strict(ins, "b32")
    to, a, b, selector = ins.operands
    x, y = w.use(a, "u4"), w.use(b, "u4")
    chosen = w.immediate(selector, "u4") if not selector.startswith("%") else None
    if chosen is None or whole(selector) & 0x8888:
        return w.define(to, f"permute({x}, {y}, {chosen or w.use(selector, 'u4')})", "u4")
    masks: dict[tuple[str, int], int] = {}
    for k in range(4):
        s = whole(selector) >> (4 * k) & 7
        place = (y if s & 4 else x, 8 * (k - (s & 3)))
        masks[place] = masks.get(place, 0) | 255 << (8 * k)
    terms = []
    for (name, up), mask in masks.items():
        moved = (
            f"{name} {'<<' if up > 0 else '>>'} {w.immediate(str(abs(up)), 'u4')}" if up else name
        )
        terms.append(f"({moved} & {w.immediate(str(mask), 'u4')})")
    return w.define(to, " | ".join(terms), "u4")


@rule("setp")
def _compare(w: Writer, ins: Instruction) -> None:
    strict(ins, *_COMPARED, *_UNSIGNED, *INTEGERS, *BITS, *FLOATS,
           "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")  # fmt: skip
    _, how, type_ = ins.parts
    to, *both = ins.operands
    form = form_of(type_)
    a, b = (w.use(name, form) for name in both)
    if how in _UNSIGNED and form[0] == "u":
        return w.define(to, f"{a} {_UNSIGNED[how]} {b}", "b")
    if how in ("num", "nan"):
        both_numbers = f"({a} == {a}) & ({b} == {b})"
        return w.define(to, both_numbers if how == "num" else f"~({both_numbers})", "b")
    if how == "ne" and form[0] == "f":  # of numbers alone, unlike neu
        return w.define(to, f"({a} < {b}) | ({a} > {b})", "b")
    if how in _COMPARED:
        return w.define(to, f"{a} {_COMPARED[how]} {b}", "b")
    if form[0] != "f":
        raise NotImplementedError(ins.name)
    opposite = {"equ": "ne", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
    if how == "neu":
        return w.define(to, f"{a} != {b}", "b")
    if how == "equ":
        return w.define(to, f"~(({a} < {b}) | ({a} > {b}))", "b")
    return w.define(to, f"~({a} {_COMPARED[opposite[how]]} {b})", "b")


@rule("dp2a")
def _two_products(w: Writer, ins: Instruction) -> None:
    """d = c and the products of both halves of a and of two bytes of b."""
    if ins.name not in ("dp2a.lo.u32.u32", "dp2a.hi.u32.u32"):
        raise NotImplementedError(ins.name)
    to, *given = ins.operands
    a, b, c = (w.use(name, "u4") for name in given)
    first = 16 if ins.parts[1] == "hi" else 0

    def part(of: str, from_: int, bits: int) -> str:
        mask = w.immediate(str((1 << bits) - 1), "u4")
        return f"({of} >> {w.immediate(str(from_), 'u4')} & {mask})"

    products = [f"{part(a, 16 * k, 16)} * {part(b, first + 8 * k, 8)}" for k in (0, 1)]
    w.define(to, " + ".join([c, *products]), "u4")


@rule("selp")
def _choose(w: Writer, ins: Instruction) -> None:
    strict(ins, *INTEGERS, *BITS, *FLOATS)
    form = form_of(ins.parts[-1])
    to, a, b, mask = ins.operands
    w.define(to, f"select({w.use(mask, 'b')}, {w.use(a, form)}, {w.use(b, form)})", form)


@rule("mov")
def _move(w: Writer, ins: Instruction) -> None:
    strict(ins, *INTEGERS, *BITS, *FLOATS, "pred")
    to, source = ins.operands
    form = form_of(ins.parts[-1])
    if to.startswith("{"):
        names = split(to[1:-1])
        each = f"u{int(form[1:]) // len(names)}"
        for k, name in enumerate(names):
            if name != "_":
                amount = w.immediate(str(8 * int(each[1:]) * k), form)
                w.define(name, f"({w.use(source, form)} >> {amount}).astype({each})", each)
    elif source.startswith("{"):
        names = split(source[1:-1])
        each = int(form[1:]) // len(names)
        parts = []
        for k, name in enumerate(names):
            amount = w.immediate(str(8 * each * k), form)
            parts.append(f"({w.use(name, f'u{each}')}.astype({form}) << {amount})")
        w.define(to, " | ".join(parts), form)
    else:
        known = w.forms.get(source, {})
        w.define(to, w.use(source, next(iter(known), form)), next(iter(known), form))
        if source in SPECIAL:
            return
        w.forms[to] |= {other: name for other, name in known.items() if other != "b"}


@rule("cvta")
def _generic(w: Writer, ins: Instruction) -> None:
    """Addresses of a space to generic ones and back; those of global memory are the same."""
    strict(ins, "to", "global", "local", "shared", "u64")
    space = ins.parts[-2]
    begin = {"global": 0, "local": LOCAL, "shared": SHARED}[space]
    sign = "-" if "to" in ins.parts else "+"
    to, source = ins.operands
    at = w.use(source, "u8")
    w.define(to, f"{at} {sign} {w.immediate(str(begin), 'u8')}" if begin else at, "u8")
