"""Arithmetic that numpy has not, or has otherwise: what the functions that emit.py writes call.

Arguments are arrays, or numpy's scalars where all lanes have the same number.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = {f"{kind}{size}": np.dtype(f"{kind}{size}") for kind in "ui" for size in (1, 2, 4, 8)}
DTYPES |= {f"f{size}": np.dtype(f"f{size}") for size in (2, 4, 8)}
_U4, _U8, _I8, _F2, _F4, _F8 = (DTYPES[name] for name in ("u4", "u8", "i8", "f2", "f4", "f8"))
NAN = np.uint32(0x7FFFFFFF).view(_F4)  # what operations of float32 make
NAN_HALF = np.uint16(0x7FFF).view(_F2)
NAN_DOUBLE = np.float64(np.nan)

NAMES: dict[str, Any] = dict(DTYPES)


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    NAMES[function.__name__] = function
    return function


class Unspecified(Exception):
    """What the PTX ISA gives no result for."""


@named
def select(mask: Any, yes: Any, no: Any) -> Any:
    if mask.ndim == 0:
        return yes if mask else no
    return np.where(mask, yes, no)


@named
def nan_f4(x: Any) -> Any:
    bad = x != x
    return select(bad, NAN, x) if bad.any() else x


@named
def nan_f8(x: Any) -> Any:
    bad = x != x
    return select(bad, NAN_DOUBLE, x) if bad.any() else x


@named
def nan_f2(x: Any) -> Any:
    bad = x != x
    return select(bad, NAN_HALF, x) if bad.any() else x


def _sum_to_odd(p: Any, c: Any) -> Any:
    """p + c in float64, rounded to odd, so that rounding once more to half as many bits is as if it
    were the first time."""
    s = np.asarray(p + c)
    back = s - p
    lost = (p - (s - back)) + (c - back)
    bits = s.view(_I8)
    move = ((lost > 0) | (lost < 0)) & (bits & 1 == 0)
    return (bits + move * np.where((lost > 0) == (s > 0), 1, -1)).view(_F8)


@named
def fma_f4(a: Any, b: Any, c: Any) -> Any:
    """Rounded once: a product of two float32 is exact in float64."""
    return _sum_to_odd(a.astype(_F8) * b.astype(_F8), c.astype(_F8)).astype(_F4)


def _halves(x: Any) -> tuple[Any, Any]:
    """Both of a word, low first, in float64."""
    return tuple((x >> np.uint32(k)).astype("u2").view(_F2).astype(_F8) for k in (0, 16))


def _word(low: Any, high: Any) -> Any:
    """Two numbers of float16 as a word."""
    low, high = (nan_f2(x).view("u2").astype(_U4) for x in (low, high))
    return low | high << np.uint32(16)


@named
def fma_halves(a: Any, b: Any, c: Any) -> Any:
    found = (
        _sum_to_odd(x * y, z).astype(_F2)
        for x, y, z in zip(_halves(a), _halves(b), _halves(c), strict=True)
    )
    return _word(*found)


@named
def add_halves(a: Any, b: Any) -> Any:
    """Sums of float16 are exact in float64."""
    return _word(*((x + y).astype(_F2) for x, y in zip(_halves(a), _halves(b), strict=True)))


@named
def sub_halves(a: Any, b: Any) -> Any:
    return _word(*((x - y).astype(_F2) for x, y in zip(_halves(a), _halves(b), strict=True)))


@named
def mul_halves(a: Any, b: Any) -> Any:
    return _word(*((x * y).astype(_F2) for x, y in zip(_halves(a), _halves(b), strict=True)))


@named
def half_of(x: Any) -> Any:
    """float32 or float64 to float16, to nearest even."""
    return nan_f2(x.astype(_F2))


@named
def single_of(x: Any) -> Any:
    return nan_f4(x.astype(_F4))


@named
def double_of(x: Any) -> Any:
    return nan_f8(x.astype(_F8))


@named
def bfloat16_of(x: Any) -> Any:
    """float32 to the bits of bfloat16, to nearest even; a NaN is 0x7fff."""
    bits = x.view(_U4)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return select(np.isnan(x), np.uint16(0x7FFF), (bits >> np.uint32(16)).astype("u2"))


@named
def two_halves(high: Any, low: Any) -> Any:
    return _word(low.astype(_F2), high.astype(_F2))


@named
def two_bfloat16(high: Any, low: Any) -> Any:
    return bfloat16_of(low).astype(_U4) | bfloat16_of(high).astype(_U4) << np.uint32(16)


_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@named
def integer_of(x: Any, rounding: str, form: str) -> Any:
    """A float as an integer: past the ends of its range the end, zero for a NaN."""
    kind = DTYPES[form]
    info = np.iinfo(kind)
    whole = _ROUND[rounding](x.astype(_F8))
    # The last number of 64 bits is no float64: what is past it is put in by itself.
    top = np.float64(info.max)
    over = whole >= top
    inside = np.clip(np.where(np.isnan(whole) | over, 0, whole), info.min, info.max)
    found = inside.astype(kind)
    if np.isnan(whole).any() and kind.itemsize == 8:
        raise NotImplementedError("a NaN as an integer of 64 bits")
    return np.where(over, kind.type(info.max), found)[()]


@named
def least_f4(a: Any, b: Any) -> Any:
    """-0 below +0; of a NaN and a number the number."""
    equal = (a.view(_U4) | b.view(_U4)).view(_F4)
    return _one_of(a < b, b < a, a == b, equal, a, b)


@named
def most_f4(a: Any, b: Any) -> Any:
    equal = (a.view(_U4) & b.view(_U4)).view(_F4)
    return _one_of(a > b, b > a, a == b, equal, a, b)


def _one_of(first: Any, second: Any, same: Any, equal: Any, a: Any, b: Any) -> Any:
    one = select(first, a, select(second, b, select(same, equal, NAN)))
    odd = ~(first | second | same)
    if odd.any():
        one = select(odd, select(a == a, a, select(b == b, b, NAN)), one)
    return one


def _nonzero(b: Any) -> None:
    if np.any(b == 0):
        raise Unspecified("division by zero, whose result is not specified")


@named
def quotient(a: Any, b: Any) -> Any:
    """Of integers, cut off towards zero."""
    _nonzero(b)
    found = a // b
    if a.dtype.kind == "i":
        found = found + ((a % b != 0) & ((a < 0) != (b < 0)))
    return found.astype(a.dtype)


@named
def remainder(a: Any, b: Any) -> Any:
    return (a - quotient(a, b) * b).astype(a.dtype)


@named
def shift_left(a: Any, amount: Any) -> Any:
    """Amounts of more than the width are the width."""
    bits = a.dtype.itemsize * 8
    found = a << np.minimum(amount, np.uint32(bits - 1)).astype(a.dtype)
    return select(np.asarray(amount >= bits), a.dtype.type(0), found)


@named
def shift_right(a: Any, amount: Any) -> Any:
    """Of signed numbers, which fill up with the sign, and of others."""
    bits = a.dtype.itemsize * 8
    found = a >> np.minimum(amount, np.uint32(bits - 1)).astype(a.dtype)
    return (
        found if a.dtype.kind == "i" else select(np.asarray(amount >= bits), a.dtype.type(0), found)
    )


@named
def leading_zeros(x: Any) -> Any:
    return (np.uint32(32) - np.frexp(x.astype(_F8))[1].astype(_U4)).astype(_U4)


@named
def permute(a: Any, b: Any, selector: Any) -> Any:
    """prmt: byte k is byte s of a and b in a row, or, from 8 on, eight times its sign."""
    both = a.astype(_U8) | b.astype(_U8) << np.uint64(32)
    found: Any = np.uint32(0)
    for k in range(4):
        s = selector >> np.uint32(4 * k) & np.uint32(15)
        byte = (both >> ((s & np.uint32(7)) * np.uint32(8)).astype(_U8)).astype(_U4) & np.uint32(
            255
        )
        sign = (byte >> np.uint32(7)) * np.uint32(255)
        found = found | select(np.asarray(s >= 8), sign, byte) << np.uint32(8 * k)
    return found


NAMES |= {"square_root": np.sqrt, "minimum": np.minimum, "maximum": np.maximum}
