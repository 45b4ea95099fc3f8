"""The element types of safetensors, and float32 to and from the float ones.

bfloat16 is the upper half of a float32 and has no numpy dtype: it is read as uint16.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

# Bits of one element; F4 and F6 pack several elements into a byte.
DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "C64": 64,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
DTYPE_BYTES: dict[str, int] = {name: bits // 8 for name, bits in DTYPE_BITS.items() if bits >= 8}
# BF16 and the 8-bit floats have no numpy dtype: they are read as the integers that hold them.
NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "C64": "<c8",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
FLOAT_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})


def written_dtype(dtype: str) -> str:
    """What a tensor of a model is written as that is not quantized: engines compute in no F64."""
    return "F32" if dtype == "F64" else dtype


def byte_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; dtype must be a key of DTYPE_BITS."""
    return (prod(shape) * DTYPE_BITS[dtype] + 7) // 8


def as_array(raw: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Raw bytes as an array of their numpy dtype, without a copy; BF16 comes as uint16."""
    if dtype not in NUMPY_DTYPES:
        raise UnsupportedError(f"{dtype} tensors cannot be read as numbers by this version")
    return raw.view(NUMPY_DTYPES[dtype]).reshape(tuple(shape))


def check_floats(dtype: str, name: str = "") -> None:
    """UnsupportedError, naming the tensor where that is told, for what is no float that is read."""
    if dtype not in FLOAT_DTYPES:
        raise UnsupportedError(
            f"{name and f'{name}: '}expected weights in F32, F16 or BF16, found {dtype}; this "
            "version reads no other"
        )


def to_float32(raw: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[np.float32]:
    """Raw bytes of a float tensor as float32; exact for F16, BF16 and F32."""
    check_floats(dtype)
    array = as_array(raw, dtype, shape)
    if dtype == "BF16":
        wide = array.astype(np.uint32)
        np.left_shift(wide, np.uint32(16), out=wide)
        return wide.view(np.float32)
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def from_float32(array: NDArray[np.float32], dtype: str, name: str) -> NDArray[np.uint8]:
    """Raw bytes of `array` in dtype, rounded to nearest even; uint8 [nbytes].

    FormatError, naming the tensor, where a finite value is too large for dtype.
    """
    source = np.ascontiguousarray(array, dtype=np.float32)
    stored: NDArray[Any]
    if dtype == "F64":
        return source.astype("<f8").reshape(-1).view(np.uint8)
    if dtype == "F32":
        return source.reshape(-1).view(np.uint8)
    if dtype == "F16":
        with np.errstate(over="ignore", under="ignore"):
            stored = source.astype("<f2")
        infinite = np.isinf(stored)
    elif dtype == "BF16":
        bits = source.view(np.uint32)
        stored = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
        nan = np.isnan(source)
        if nan.any():  # the rounding would carry a NaN's payload into its exponent
            stored[nan] = 0x7FC0
        infinite = (stored & 0x7FFF) == 0x7F80
    else:
        raise FormatError(f"{name}: float weights cannot be written as {dtype}")
    if infinite.any() and (infinite & np.isfinite(source)).any():
        index = tuple(int(i) for i in np.argwhere(infinite & np.isfinite(source))[0])
        raise FormatError(
            f"{name}: the value {float(source[index]):.6g} at {list(index)} is too large for "
            f"{dtype}; write this tensor as F32 or BF16"
        )
    return stored.reshape(-1).view(np.uint8)
