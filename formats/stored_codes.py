"""Matrices whose codes fill bytes: what int8, FP8 and FP4 checkpoints of all kinds have in common.

    weight           int8, float8_e4m3 or float8_e5m2 [out, in]    one code a byte
    weight_packed    uint8 [out, in / 2]                           two of four bits, low one first
    scales           one number, [out] or [out, 1], [out, groups], or [out / rows, in / columns]
    zeros            int8, of the scales' shape; none where symmetric

What a file calls its scales and zeros is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats.facts import Look, Stored, check_shape, find
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

Get = Callable[[str], "NDArray[Any]"]

# Stored dtypes by what a scheme calls them; those of arrays too, for what was read already.
SCALE_DTYPES = {
    "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F8_E4M3": "float8_e4m3", "F8_E8M0": "e8m0", "U8": "e8m0",
}  # fmt: skip
STORED_DTYPES = {name: stored for stored, name in SCALE_DTYPES.items()}  # e8m0 is written as U8
_FLOATS = ("float16", "bfloat16", "float32")
_PAIRS = ("U8", "uint8", "I8", "int8")  # which hold two codes of four bits each
_CODES = {"int": ("I8", "int8"), "e4m3": ("F8_E4M3", "uint8"), "e5m2": ("F8_E5M2", "uint8")}
# Which of an array's dtypes hold which stored ones: those numpy lacks are read as something else.
_READ_AS = {"uint8": ("float8_e4m3", "e8m0"), "float16": ("float16",), "float32": _FLOATS}


def scale_dtype(name: str, stored: Stored, wanted: str) -> str:
    """What scales are stored in; FormatError unless it is `wanted`, or a float like it."""
    dtype = str(stored.dtype)
    found = SCALE_DTYPES.get(dtype)
    if found is None and dtype in _READ_AS:  # an array: the header was looked at before
        found = wanted if wanted in _READ_AS[dtype] else _READ_AS[dtype][-1]
    if found == wanted or (found in _FLOATS and wanted in _FLOATS):
        return str(found)
    if found == "e8m0" and wanted in _FLOATS and dtype != "U8":
        return "e8m0"
    expected = "float16, bfloat16 or float32" if wanted in _FLOATS else wanted
    raise FormatError(f"{name}: the dtype is {dtype}; expected {expected}")


def looking(get: Get) -> Look:
    """`get`, with None for what is not there."""

    def look(name: str) -> Stored | None:
        try:
            return get(name)
        except KeyError:
            return None

    return look


def check_grid(name: str, found: tuple[int, ...], grid: tuple[int, int]) -> None:
    """FormatError where scales have another shape; axes of one element may be left out."""
    allowed = [grid]
    if grid[1] == 1:
        allowed.append(grid[:1])  # type: ignore[arg-type]
    if grid == (1, 1):
        allowed.append(())  # type: ignore[arg-type]
    if found not in allowed:
        check_shape(name, found, grid)


def look_up(look: Look, name: str) -> Stored:
    """A stored tensor of any number of axes; FormatError where it is missing."""
    stored = look(name)
    if stored is None:
        raise FormatError(f"{name}: missing, though the rest of its matrix is there")
    return stored


def matrix(look: Look, name: str) -> tuple[Stored, tuple[int, int]]:
    """A stored matrix that is not empty."""
    stored = find(look, name)
    rows, columns = stored.shape
    if not (rows and columns):
        raise FormatError(f"{name}: it is empty")
    return stored, (rows, columns)


def scheme_of_bytes(
    module: str, look: Look, wanted: Scheme, scales: str, zeros: str | None = None
) -> tuple[Scheme, tuple[int, int]]:
    """Scheme and shape [out, in] of a matrix with a code in each byte of `weight`.

    wanted: what the config says; scales, zeros: names of tensors. The dtype of the scales is the
    file's.
    """
    stored, shape = matrix(look, f"{module}.weight")
    if str(stored.dtype) not in _CODES[wanted.book]:
        expected = {"int": "int8"}.get(wanted.book, f"float8_{wanted.book}")
        raise FormatError(f"{module}.weight: the dtype is {stored.dtype}; expected {expected}")
    return with_grid(look, wanted, shape, scales, zeros), shape


def with_grid(
    look: Look, wanted: Scheme, shape: tuple[int, int], scales: str, zeros: str | None = None
) -> Scheme:
    """The scheme with the scales' own dtype; FormatError where they do not fit the matrix."""
    scale = look_up(look, scales)
    found = replace(wanted, scale_dtype=scale_dtype(scales, scale, wanted.scale_dtype))
    check_grid(scales, scale.shape, found.grid(shape))
    if zeros is not None:
        zero = look_up(look, zeros)
        check_grid(zeros, zero.shape, found.grid(shape))
        if str(zero.dtype) not in ("I8", "int8"):
            raise FormatError(f"{zeros}: the dtype is {zero.dtype}; expected int8")
    return found


def scheme_of_nibbles(
    module: str, look: Look, wanted: Scheme, codes: str, scales: str
) -> tuple[Scheme, tuple[int, int]]:
    """The same for four-bit floats, two in each byte of `codes`."""
    stored, (rows, half) = matrix(look, codes)
    if str(stored.dtype) not in _PAIRS:
        raise FormatError(f"{codes}: the dtype is {stored.dtype}; expected uint8")
    shape = (rows, 2 * half)
    if shape[1] % wanted.group_size:
        raise FormatError(f"{module}: {shape[1]} columns are no groups of {wanted.group_size}")
    return with_grid(look, wanted, shape, scales), shape


def scale_grid(stored: NDArray[Any], scheme: Scheme, shape: tuple[int, int]) -> NDArray[Any]:
    """Scales as read, in the shape that a GroupQuant has them in; bytes become numbers."""
    grid = stored.reshape(scheme.grid(shape))
    if grid.dtype == np.uint8:
        from qtool.float_codes import decode_scale

        return decode_scale(grid, scheme.scale_dtype)
    return grid


def unsigned(module: str, stored: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """int8 in -2^(bits-1) .. as codes from 0 on; FormatError where one does not fit."""
    middle = 1 << (bits - 1)
    if bits < 8 and stored.size and not -middle <= int(stored.min()) <= int(stored.max()) < middle:
        raise FormatError(
            f"{module}: it has the code {int(np.abs(stored.astype(np.int16)).max())}, which does "
            f"not fit {bits} bits"
        )
    return (stored.view(np.uint8) + np.uint8(middle)).astype(np.uint8)


def signed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """The inverse."""
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def middle_zeros(scheme: Scheme, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The zeros of a symmetric scheme; small floats have none, which is told as 0."""
    middle = 0 if scheme.is_float else 1 << (scheme.bits - 1)
    return np.full(scheme.grid(shape), middle, np.uint8)


def read_bytes(
    module: str,
    get: Get,
    scheme: Scheme,
    shape: tuple[int, int],
    scales: str,
    zeros: str | None = None,
    outer: float | None = None,
) -> GroupQuant:
    """One matrix with a code in each byte of `weight`."""
    weight = get(f"{module}.weight")
    codes = weight if scheme.is_float else unsigned(f"{module}.weight", weight, scheme.bits)
    scale = scale_grid(get(scales), scheme, shape)
    zero = middle_zeros(scheme, shape)
    if zeros is not None:
        zero = unsigned(zeros, get(zeros), scheme.bits).reshape(scheme.grid(shape))
    return GroupQuant(scheme, codes, scale, zero, None, outer)


def read_nibbles(
    get: Get, scheme: Scheme, shape: tuple[int, int], codes: str, scales: str, outer: str | None
) -> GroupQuant:
    """One matrix of four-bit floats; outer: the name of a tensor."""
    from qtool.float_codes import unpack_nibbles

    scale = scale_grid(get(scales), scheme, shape)
    second = None if outer is None else one_number(outer, get(outer))
    return GroupQuant(
        scheme,
        unpack_nibbles(get(codes).view(np.uint8)),
        scale,
        middle_zeros(scheme, shape),
        None,
        second,
    )


def one_number(name: str, stored: NDArray[Any]) -> float:
    """The number in a tensor of one element."""
    if stored.size != 1:
        raise FormatError(f"{name}: the shape is {list(stored.shape)}; expected one number")
    return float(stored.reshape(-1)[0])


def stored_scale(module: str, quant: GroupQuant) -> NDArray[Any]:
    """A GroupQuant's scales as they are written: in their dtype, bfloat16 as uint16, small floats
    as bytes. FormatError where that is not exact."""
    wanted = quant.scheme.scale_dtype
    wide = quant.scale.astype(np.float32)
    written: NDArray[Any]
    if wanted == "bfloat16":
        written = (np.ascontiguousarray(wide).view(np.uint32) >> np.uint32(16)).astype("<u2")
        exact = written.astype(np.uint32) << np.uint32(16)
        same = exact.view(np.float32) == wide
    elif wanted in ("float16", "float32"):
        with np.errstate(over="ignore"):
            written = quant.scale.astype(np.dtype(wanted))
        same = written.astype(np.float32) == wide
    else:
        from qtool.float_codes import decode_scale, encode, exponent

        written = exponent(wide) if wanted == "e8m0" else encode(wide, "e4m3")
        same = decode_scale(written, wanted) == wide
    if not same.all():
        raise FormatError(f"{module}: a scale is no {wanted} number, as its scheme says")
    return written
