"""Instructions on floats; those whose name integers share (add, mul, ...) are told apart here."""

from support.ptx.emit import Writer, bits_of, form_of, rule, size_of, strict
from support.ptx.parse import Instruction, split
from support.ptx.rules_integer import (
    FLOATS,
    INTEGERS,
    integer_negative,
    integer_product,
    integer_quotient,
    integer_sum,
)

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_OF_INTEGERS = {"add": integer_sum, "sub": integer_sum, "mul": integer_product,
                "div": integer_quotient}  # fmt: skip
_HALF_PAIRS = {"add": "add_halves", "sub": "sub_halves", "mul": "mul_halves", "fma": "fma_halves"}


@rule("add", "sub", "mul", "div")
def _arithmetic(w: Writer, ins: Instruction) -> None:
    type_ = ins.parts[-1]
    to, a, b = ins.operands
    if type_ == "f16x2" and ins.parts[0] != "div":
        strict(ins, "rn", "f16x2")
        function = _HALF_PAIRS[ins.parts[0]]
        w.define(to, f"{function}({w.use(a, 'u4')}, {w.use(b, 'u4')})", "u4")
    elif type_ in FLOATS:
        strict(ins, "rn", *FLOATS)
        form = form_of(type_)
        w.number(to, f"{w.use(a, form)} {_SIGNS[ins.parts[0]]} {w.use(b, form)}", form)
    else:
        _OF_INTEGERS[ins.parts[0]](w, ins)


@rule("fma")
def _fused(w: Writer, ins: Instruction) -> None:
    strict(ins, "rn", "f32", "f16x2")
    to, *sources = ins.operands
    if ins.parts[-1] == "f16x2":
        return w.define(to, f"fma_halves({', '.join(w.use(n, 'u4') for n in sources)})", "u4")
    return w.number(to, f"fma_f4({', '.join(w.use(n, 'f4') for n in sources)})", "f4")


@rule("sqrt", "rcp")
def _root(w: Writer, ins: Instruction) -> None:
    strict(ins, "rn", "f32")
    if "rn" not in ins.parts:
        raise NotImplementedError(ins.name)
    to, a = ins.operands
    x = w.use(a, "f4")
    w.number(to, f"f4.type(1) / {x}" if ins.parts[0] == "rcp" else f"square_root({x})", "f4")


@rule("neg")
def _negative(w: Writer, ins: Instruction) -> None:
    if ins.parts[-1] not in FLOATS:
        return integer_negative(w, ins)
    strict(ins, *FLOATS)
    form = bits_of(ins.parts[-1])
    sign = w.immediate(str(1 << (8 * int(form[1:]) - 1)), form)
    return w.define(ins.operands[0], f"{w.use(ins.operands[1], form)} ^ {sign}", form)


@rule("abs")
def _size(w: Writer, ins: Instruction) -> None:
    strict(ins, "f32")
    w.define(ins.operands[0], f"{w.use(ins.operands[1], 'u4')} & u4.type(0x7fffffff)", "u4")


@rule("copysign")
def _with_sign(w: Writer, ins: Instruction) -> None:
    """The sign of the first and the rest of the second."""
    strict(ins, "f32")
    to, a, b = ins.operands
    sign, size = f"{w.use(a, 'u4')} & u4.type(1 << 31)", f"{w.use(b, 'u4')} & u4.type(0x7fffffff)"
    w.define(to, f"{sign} | {size}", "u4")


@rule("min", "max")
def _extreme(w: Writer, ins: Instruction) -> None:
    strict(ins, *INTEGERS, "f32")
    form = form_of(ins.parts[-1])
    to, *both = ins.operands
    a, b = (w.use(name, form) for name in both)
    least = ins.parts[0] == "min"
    if form == "f4":
        return w.number(to, f"{'least_f4' if least else 'most_f4'}({a}, {b})", form)
    return w.define(to, f"{'minimum' if least else 'maximum'}({a}, {b})", form)


@rule("cvt")
def _convert(w: Writer, ins: Instruction) -> None:
    types = [*INTEGERS, *FLOATS, "u8", "s8", "f16", "f16x2", "bf16", "bf16x2"]
    strict(ins, "rn", "rni", "rzi", "rmi", "rpi", *types)
    *modes, target, source = ins.parts[1:]
    mode = modes[0] if len(modes) == 1 else ""
    to, *given = ins.operands
    if target in ("f16x2", "bf16x2"):
        if mode != "rn" or source != "f32":
            raise NotImplementedError(ins.name)
        high, low = (w.use(name, "f4") for name in given)
        function = "two_halves" if target == "f16x2" else "two_bfloat16"
        return w.define(to, f"{function}({high}, {low})", "u4")
    (name,) = given
    if target == "bf16" and (mode, source) == ("rn", "f32"):
        return w.define(to, f"bfloat16_of({w.use(name, 'f4')})", "u2")
    if "bf16" in (target, source) or (mode == "rn") != _rounds(target, source):
        raise NotImplementedError(ins.name)
    value = w.use(name, form_of(source))
    if target[0] == "f":
        if source[0] == "f":
            function = {2: "half_of", 4: "single_of", 8: "double_of"}[size_of(target)]
            return w.define(to, f"{function}({value})", form_of(target))
        return w.define(to, f"{value}.astype({form_of(target)})", form_of(target))
    form = form_of(target)
    if source[0] == "f":
        if mode == "":
            raise NotImplementedError(ins.name)
        return w.define(to, f"integer_of({value}, {mode!r}, {form!r})", form)
    if mode:
        raise NotImplementedError(ins.name)
    return w.define(to, f"{value}.astype({form})", form)


def _rounds(target: str, source: str) -> bool:
    """Whether a conversion to a float has to say how it rounds."""
    if target[0] != "f":
        return False
    return source[0] != "f" or size_of(target) < size_of(source)


@rule("mma")
def _multiply(w: Writer, ins: Instruction) -> None:
    shape = ins.parts[3]
    if ins.parts[1:3] != ["sync", "aligned"] or shape not in ("m16n8k8", "m16n8k16"):
        raise NotImplementedError(ins.name)
    strict(ins, "sync", "aligned", shape, "row", "col", "f32", "f16")
    if ins.parts[4:] != ["row", "col", "f32", "f16", "f16", "f32"]:
        raise NotImplementedError(ins.name)
    d, a, b, c = (split(operand[1:-1]) for operand in ins.operands)
    given = [[w.use(name, form) for name in own] for own, form in ((a, "u4"), (b, "u4"), (c, "f4"))]
    lists = ", ".join(f"[{', '.join(own)}]" for own in given)
    found = w.keep(f"m.multiply(lanes, {lists})")
    for k, name in enumerate(d):
        w.number(name, f"{found}[{k}]", "f4")
