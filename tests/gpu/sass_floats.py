"""What the instructions of floats do: single precision, and conversions."""

from typing import Any

import numpy as np
from sass_opcodes import M32, compare, joined, of


@of("FSETP")
def _fsetp(w: Any, i: Any, a: Any) -> None:
    to, other, x, y, more = i.operands
    found = compare(
        next(f for f in i.flags if f not in ("AND", "OR", "XOR", "FTZ")), w.number(x), w.number(y)
    )
    by = next(flag for flag in i.flags if flag in ("AND", "OR", "XOR"))
    w.put_predicate(to, joined(by, found, w.predicate(more)), a)
    w.put_predicate(other, joined(by, ~found, w.predicate(more)), a)


@of("FSEL")
def _fselect(w: Any, i: Any, a: Any) -> None:
    to, x, y, which = i.operands
    w.put_float(to, np.where(w.predicate(which), w.number(x), w.number(y)), a)


@of("FADD", "FMUL", "FFMA", "FMNMX")
def _float(w: Any, i: Any, a: Any) -> None:
    to, x, y, *rest = i.operands
    p, q = w.number(x), w.number(y)
    if i.name == "FADD":
        made = p + q
    elif i.name == "FMUL":
        made = p * q
    elif i.name == "FFMA":
        made = p.astype(np.float64) * q.astype(np.float64) + w.number(rest[0]).astype(np.float64)
    else:
        made = np.where(w.predicate(rest[-1]), np.fmin(p, q), np.fmax(p, q))
    w.put_float(to, made, a)


@of("MUFU")
def _mufu(w: Any, i: Any, a: Any) -> None:
    x = w.number(i.operands[1])
    kind = i.flags[0]
    made = {"RCP": lambda: 1 / x, "RSQ": lambda: 1 / np.sqrt(x), "SQRT": lambda: np.sqrt(x)}[kind]()
    w.put_float(i.operands[0], made, a)


@of("FCHK")
def _fchk(w: Any, i: Any, a: Any) -> None:
    """Whether a quotient needs the slow way."""
    x, y = np.abs(w.number(i.operands[1])), np.abs(w.number(i.operands[2]))
    easy = (y > 2.0**-126) & (y < 2.0**126) & (x < 2.0**126) & ((x > 2.0**-100) | (x == 0))
    w.put_predicate(i.operands[0], ~easy, a)


@of("I2F", "I2FP")
def _to_float(w: Any, i: Any, a: Any) -> None:
    bits = w.word(i.operands[1])
    if "U16" in i.flags or "U8" in i.flags:
        bits = bits & np.uint32(0xFFFF if "U16" in i.flags else 0xFF)
    unsigned = any(flag.startswith("U") for flag in i.flags)
    w.put_float(i.operands[0], (bits if unsigned else bits.view(np.int32)).astype(np.float32), a)


@of("F2I")
def _to_integer(w: Any, i: Any, a: Any) -> None:
    x = np.nan_to_num(
        w.number(i.operands[1]).astype(np.float64), posinf=2**31 - 1, neginf=-(2.0**31)
    )
    x = np.trunc(x) if "TRUNC" in i.flags else np.rint(x)
    low, high = (0, M32) if "U32" in i.flags else (-(2**31), 2**31 - 1)
    w.put(i.operands[0], np.clip(x, low, high).astype(np.int64), a)


@of("FRND")
def _round(w: Any, i: Any, a: Any) -> None:
    w.put_float(i.operands[0], np.rint(w.number(i.operands[1])), a)


def halves(w: Any, text: str) -> tuple[Any, Any]:
    """Low and high, of an operand of half precision."""
    sign = -1 if text[0] == "-" else 1
    bits = w.word(text.lstrip("-").strip("|"))
    low = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32) * sign
    high = (bits >> np.uint32(16)).astype(np.uint16).view(np.float16).astype(np.float32) * sign
    if "H0_H0" in text:
        return low, low
    return (high, high) if "H1_H1" in text else (low, high)


@of("HADD2")
def _hadd2(w: Any, i: Any, a: Any) -> None:
    """As the conversion of a half to a float."""
    if "F32" not in i.flags:
        raise NotImplementedError(i)
    w.put_float(i.operands[0], halves(w, i.operands[2])[0], a)


@of("HFMA2")
def _hfma2(w: Any, i: Any, a: Any) -> None:
    """As a constant: two halves, the upper one first."""
    if not {i.operands[1].lstrip("-"), i.operands[2].lstrip("-")} <= {"RZ"}:
        raise NotImplementedError(i)
    top, low = (np.float16(float(text)).view(np.uint16) for text in i.operands[3:5])
    w.put(i.operands[0], np.full(32, int(top) << 16 | int(low)), a)


@of("F2FP")
def _pack(w: Any, i: Any, a: Any) -> None:
    to, high, low, *_ = i.operands
    made = []
    for text in (low, high):
        x = w.number(text)
        if "BF16" in i.flags:
            made.append(x.view(np.uint32).astype(np.int64) >> 16)
        else:
            made.append(x.astype(np.float16).view(np.uint16).astype(np.int64))
    w.put(to, made[0] | made[1] << 16, a)


@of("F2F")
def _f2f(w: Any, i: Any, a: Any) -> None:
    w.put(
        i.operands[0],
        w.number(i.operands[1]).astype(np.float16).view(np.uint16).astype(np.int64),
        a,
    )


@of("HMUL2", "HADD2", "HFMA2")
def _halves(w: Any, i: Any, a: Any) -> None:
    """Their numbers are looked at by nothing here."""
    w.put(i.operands[0], np.zeros(32, int), a)


@of("HMMA")
def _tensor(w: Any, i: Any, a: Any) -> None:
    for k in range(4):
        w.put(i.operands[0], np.zeros(32, int), a, k)
