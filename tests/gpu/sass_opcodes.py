"""What the instructions of sass_machine.py do that are neither memory nor control."""

from collections.abc import Callable
from typing import Any

import numpy as np

M32 = 0xFFFFFFFF
OPCODES: dict[str, Callable[[Any, Any, Any], None]] = {}


def of(*names: str) -> Callable[[Any], Any]:
    def keep(function: Any) -> Any:
        for name in names:
            OPCODES[name] = function
        return function

    return keep


def signed(bits: Any) -> Any:
    return np.asarray(bits).astype(np.uint32).astype(np.int32).astype(np.int64)


@of(
    "NOP",
    "BAR",
    "CGAERRBAR",
    "WARPSYNC",
    "MEMBAR",
    "ERRBAR",
    "CCTL",
    "BMOV",
    "DEPBAR",
    "YIELD",
    "PREEXIT",
    "ACQBULK",
)
def _nothing(_w: Any, _i: Any, _a: Any) -> None: ...


@of("LDC", "ULDC")
def _constant(w: Any, i: Any, a: Any) -> None:
    pair = 2 if "64" in i.flags else 1
    words = [w.word(i.operands[1], k).copy() for k in range(pair)]
    if "U8" in i.flags:
        words[0] &= np.uint32(255)
    for k, word in enumerate(words):
        w.put(i.operands[0], word, a, k)


@of("S2R", "S2UR", "CS2R")
def _special(w: Any, i: Any, a: Any) -> None:
    value = 0 if i.operands[1] == "SRZ" else w.special.get(i.operands[1], 0)
    w.put(i.operands[0], np.broadcast_to(np.asarray(value), 32), a)
    if i.name == "CS2R" and "32" not in i.flags:
        w.put(i.operands[0], np.zeros(32, int), a, 1)


@of("MOV", "UMOV", "R2UR", "IMOV")
def _move(w: Any, i: Any, a: Any) -> None:
    w.put(i.operands[0], w.word(i.operands[1]).copy(), a)


@of("IMAD", "UIMAD")
def _imad(w: Any, i: Any, a: Any) -> None:
    to, x, y, z, *rest = i.operands
    if z.lstrip("!") in ("PT",) or (z.lstrip("!").startswith("P") and rest):
        raise NotImplementedError(i)
    convert = (lambda v: v) if "U32" in i.flags else signed
    p, q = convert(w.word(x)).astype(object), convert(w.word(y)).astype(object)
    sign = -1 if x[0] == "-" else 1
    if y[0] == "-" and y[1] in "RUc":
        sign = -sign
    product = sign * np.array(p, object) * np.array(q, object)
    if "WIDE" in i.flags:
        total = product + w.wide(z).astype(object)
        w.put(to, np.array([int(v) & M32 for v in total]), a)
        w.put(to, np.array([int(v) >> 32 & M32 for v in total]), a, 1)
        return
    if "HI" in i.flags:
        total = np.array([int(v) >> 32 for v in product + w.wide(z).astype(object)], object)
    else:
        total = product + w.integer(z).astype(object)
    if "X" in i.flags:
        total = total + w.predicate(rest[0]).astype(int).astype(object)
    w.put(to, np.array([int(v) & M32 for v in total]), a)


@of("IADD3", "UIADD3")
def _iadd3(w: Any, i: Any, a: Any) -> None:
    parts = list(i.operands)
    to = parts.pop(0)
    carries = []
    while parts[0].lstrip("U").startswith("P"):
        carries.append(parts.pop(0))
    terms, rest = parts[:3], parts[3:]
    total = np.zeros(32, np.int64)
    extended = "X" in i.flags
    for text in terms:
        own = w.word(text.lstrip("-")).astype(np.int64)
        if text[0] == "-" and text[1] in "RUc":
            own = (~own & M32) + (0 if extended else 1)
        elif text[0] == "-":
            own = w.word(text).astype(np.int64)
        total = total + own
    if extended:
        for text in rest:
            total = total + w.predicate(text).astype(np.int64)
    for text in carries:
        w.put_predicate(text, total >> 32 > 0, a)
    w.put(to, total & M32, a)


@of("VIADD")
def _viadd(w: Any, i: Any, a: Any) -> None:
    w.put(i.operands[0], w.integer(i.operands[1]) + w.integer(i.operands[2]), a)


@of("LEA", "ULEA")
def _lea(w: Any, i: Any, a: Any) -> None:
    to, *parts = i.operands
    carry = None
    if parts[0].lstrip("U").startswith("P") and parts[0] not in ("PT",):
        carry = parts.pop(0)
    elif parts[0] in ("PT", "UPT"):
        parts.pop(0)
    x, y = w.word(parts[0]).astype(np.int64), w.word(parts[1]).astype(np.int64)
    if parts[0][0] == "-":
        x = -x & M32
    if "HI" not in i.flags:
        total = (x << int(parts[2], 16) & M32) + y
        if carry:
            w.put_predicate(carry, total >> 32 > 0, a)
        return w.put(to, total, a)
    if "SX32" in i.flags:
        shift = int(parts[2], 16)
        top = signed(x) >> (32 - shift)
        rest = parts[3:]
    else:
        above = w.word(parts[2]).astype(np.int64)
        shift = int(parts[3], 16)
        top = (above << shift | x >> (32 - shift)) & M32 if shift else above
        rest = parts[4:]
    total = (top & M32) + y
    if "X" in i.flags and rest:
        total = total + w.predicate(rest[-1]).astype(np.int64)
    w.put(to, total, a)
    return None


@of("SHF", "USHF")
def _shift(w: Any, i: Any, a: Any) -> None:
    to, low, by, high = i.operands
    amount = w.word(by).astype(np.int64)
    x, y = w.word(low).astype(np.int64), w.word(high).astype(np.int64)
    wide = "U64" in i.flags or "S64" in i.flags
    amount = (
        amount & 63 if wide else (np.minimum(amount, 32) if "W" not in i.flags else amount & 31)
    )
    if "L" in i.flags:
        both = y << 32 | x
        both = np.array(
            [(int(v) & (2**64 - 1)) << int(s) for v, s in zip(both, amount, strict=True)], object
        )
        part = [int(v) >> 32 & M32 if "HI" in i.flags else int(v) & M32 for v in both]
        return w.put(to, np.array(part), a)
    top = signed(y) if any(flag in ("S32", "S64") for flag in i.flags) else y
    found = []
    for high_one, low_one, s in zip(top, x, amount, strict=True):
        both = int(high_one) << 32 | int(low_one)
        # .HI takes the upper word, shifted; else the lower one of both.
        found.append(int(high_one) >> int(s) & M32 if "HI" in i.flags else both >> int(s) & M32)
    w.put(to, np.array(found), a)
    return None


def lut(table: int, x: Any, y: Any, z: Any) -> Any:
    found = np.zeros(32, np.int64)
    for k in range(8):
        if table >> k & 1:
            own = (x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z)
            found |= own
    return found & M32


@of("LOP3", "ULOP3")
def _lop3(w: Any, i: Any, a: Any) -> None:
    parts = list(i.operands)
    told = parts.pop(0) if parts[0].lstrip("U").startswith("P") else None
    to, x, y, z, table = parts[:5]
    made = lut(int(table, 16), *(w.word(text).astype(np.int64) for text in (x, y, z)))
    if told:
        w.put_predicate(told, made != 0, a)
    w.put(to, made, a)


@of("PLOP3", "UPLOP3")
def _plop3(w: Any, i: Any, a: Any) -> None:
    to, other, *three, table, _ = i.operands
    values = [w.predicate(text).astype(np.int64) * M32 for text in three]
    made = lut(int(table, 16), *values) != 0
    w.put_predicate(to, made, a)
    w.put_predicate(other, ~made, a)


def compare(how: str, x: Any, y: Any) -> Any:
    table = {
        "LT": x < y, "LE": x <= y, "GT": x > y, "GE": x >= y, "EQ": x == y, "NE": x != y,
        "GTU": ~(x <= y), "GEU": ~(x < y), "LTU": ~(x >= y), "LEU": ~(x > y), "NEU": ~(x == y),
        "NAN": np.isnan(x) | np.isnan(y), "NUM": ~(np.isnan(x) | np.isnan(y)),
        "EQU": ~(x < y) & ~(x > y),
    }  # fmt: skip
    return table[how]


def joined(how: str, x: Any, y: Any) -> Any:
    return x & y if how == "AND" else x | y if how == "OR" else x ^ y


@of("ISETP", "UISETP")
def _isetp(w: Any, i: Any, a: Any) -> None:
    to, other, x, y, *rest = i.operands
    how = i.flags[0]
    convert = signed if "U32" not in i.flags else (lambda v: np.asarray(v).astype(np.int64))
    if "EX" in i.flags:
        # The lower words were compared before: of equal upper ones, that result stands.
        below = w.predicate(rest[-1])
        p, q = convert(w.word(x)), convert(w.word(y))
        strict = compare({"GE": "GT", "LE": "LT"}.get(how, how), p, q)
        if how == "EQ":
            found = (p == q) & below
        elif how == "NE":
            found = (p != q) | below
        else:
            found = strict | ((p == q) & below)
    else:
        found = compare(how, convert(w.word(x)), convert(w.word(y)))
    by = next(flag for flag in i.flags if flag in ("AND", "OR", "XOR"))
    more = w.predicate(rest[0])
    w.put_predicate(to, joined(by, found, more), a)
    w.put_predicate(other, joined(by, ~found, more), a)


@of("SEL", "USEL")
def _select(w: Any, i: Any, a: Any) -> None:
    to, x, y, which = i.operands
    w.put(to, np.where(w.predicate(which), w.word(x), w.word(y)), a)


@of("PRMT", "UPRMT")
def _permute(w: Any, i: Any, a: Any) -> None:
    to, x, by, y = i.operands
    both = w.word(x).astype(np.int64) | w.word(y).astype(np.int64) << 32
    choice, made = w.word(by).astype(np.int64), np.zeros(32, np.int64)
    for k in range(4):
        s = choice >> (4 * k) & 15
        byte = both >> (8 * (s & 7)) & 255
        byte = np.where(s & 8, np.where(byte & 128, 255, 0), byte)
        made |= byte << (8 * k)
    w.put(to, made, a)


@of("IABS")
def _iabs(w: Any, i: Any, a: Any) -> None:
    w.put(i.operands[0], np.abs(signed(w.word(i.operands[1]))), a)


@of("IMNMX", "VIMNMX", "UIMNMX")
def _imnmx(w: Any, i: Any, a: Any) -> None:
    to, x, y, *rest = i.operands
    convert = signed if "U32" not in i.flags else (lambda v: np.asarray(v).astype(np.int64))
    p, q = convert(w.word(x)), convert(w.word(y))
    w.put(to, np.where(w.predicate(rest[-1]), np.minimum(p, q), np.maximum(p, q)), a)


@of("VIADDMNMX")
def _viaddmnmx(w: Any, i: Any, a: Any) -> None:
    to, x, y, z, which = i.operands
    total = signed((w.integer(x) + w.integer(y)) & M32)
    limit = signed(w.word(z))
    w.put(to, np.where(w.predicate(which), np.minimum(total, limit), np.maximum(total, limit)), a)


@of("FLO", "UFLO")
def _leading(w: Any, i: Any, a: Any) -> None:
    made = np.array([int(v).bit_length() - 1 if v else M32 for v in w.word(i.operands[1])])
    if "SH" in i.flags:
        made = 31 - made
    w.put(i.operands[0], made, a)


@of("POPC", "UPOPC")
def _popc(w: Any, i: Any, a: Any) -> None:
    w.put(i.operands[0], np.array([int(v).bit_count() for v in w.word(i.operands[1])]), a)


@of("P2R")
def _p2r(w: Any, i: Any, a: Any) -> None:
    made = sum(w.predicates[k].astype(np.int64) << k for k in range(7))
    w.put(i.operands[0], made & int(i.operands[-1], 16), a)


@of("R2P")
def _r2p(w: Any, i: Any, a: Any) -> None:
    bits, mask = w.word(i.operands[1]).astype(np.int64), int(i.operands[-1], 16)
    for k in range(7):
        if mask >> k & 1:
            w.put_predicate(f"P{k}", (bits >> k & 1) != 0, a)


@of("ATOMG", "ATOM")
def _atomic(w: Any, i: Any, a: Any) -> None:
    """As if it were the first to come."""
    w.put(i.operands[1], np.zeros(32, int), a)
