"""Weights of eight bits and less whose codes are numbers by themselves, to floats.

    int8, uint8            (code - zero) * scale
    float8 e4m3fn, e5m2    code * scale
    four-bit floats        (code * scale) / outer, or * outer; code s e e m: sign, then
                           0 1/2 1 3/2 2 3 4 6; scale e8m0 2^(byte - 127), 255 is NaN, or e4m3fn

All in float32, rounded in that order, then to the dtype wanted.

Sources: OCP 8-bit floating point (OFP8) 1.0; OCP microscaling formats (MX) 1.0; compressed-tensors.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.native.library import address, aligned, check, library, over_rows
from qtool.native.packing import DTYPES, row_range, wide_scale

_CODES = {"int8": 0, "uint8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}
_SCALES = {"e8m0": 0, "e4m3fn": 1}


class _Bytes(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("code", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("origin", ctypes.c_int64),
        ("values", ctypes.c_void_p),
    )


class _Fp4(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("scale_kind", ctypes.c_int32),
        ("divide", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("outer", ctypes.c_float),
        ("unused", ctypes.c_int32),
        ("values", ctypes.c_void_p),
    )


def _target(
    dtype: str, shape: tuple[int, int], out: NDArray[Any] | None
) -> tuple[int, NDArray[Any]]:
    """The dtype's number, and the array to write."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected {', '.join(DTYPES)}")
    number, numpy_dtype = DTYPES[dtype]
    return number, aligned(shape, numpy_dtype) if out is None else check(
        "out", out, numpy_dtype, shape
    )


def dequantize_bytes(
    codes: NDArray[Any],
    kind: str,
    *,
    scale: NDArray[Any],
    block: tuple[int, int],
    zero: NDArray[Any] | None = None,
    dtype: str = "float32",
    rows: tuple[int, int] | None = None,
    out: NDArray[Any] | None = None,
    threads: int | None = None,
) -> NDArray[Any]:
    """(code - zero) * scale of each weight, [out, in].

    codes: [out, in], int8 or uint8 as `kind` says, bytes (uint8) for the floats float8_e4m3fn and
    float8_e5m2. block: (rows, columns) that share a scale, -1 for all of them: (-1, -1) is one
    scale for the tensor, (1, -1) one a row, (1, g) groups, (128, 128) square blocks. scale:
    [ceil(out / rows), ceil(in / columns)], float32, float16 or bfloat16 (uint16), a multiplier
    (also where a checkpoint calls it weight_scale_inv). zero: of scale's shape and codes' dtype,
    for integers. rows, dtype, out, threads: as for `packing.dequantize`.
    """
    if kind not in _CODES:
        raise ValueError(f"codes are {kind!r}, expected {', '.join(_CODES)}")
    check("codes", codes, np.int8 if kind == "int8" else np.uint8, (None, None))
    out_features, in_features = codes.shape
    if not out_features or not in_features:
        raise ValueError(f"codes have shape {codes.shape}, expected at least one element")
    block_rows = out_features if block[0] == -1 else block[0]
    block_cols = in_features if block[1] == -1 else block[1]
    if block_rows < 1 or block_cols < 1:
        raise ValueError(f"block is {block}, expected numbers of at least 1, or -1")
    scale = wide_scale(scale)
    blocks = (-(-out_features // block_rows), -(-in_features // block_cols))
    check("scale", scale, np.float32, blocks)
    if zero is not None:
        if kind not in ("int8", "uint8"):
            raise ValueError(f"zero is given, and {kind} has none")
        check("zero", zero, codes.dtype, blocks)
    first, last = row_range(rows, out_features)
    number, values = _target(dtype, (last - first, in_features), out)
    task = _Bytes(out_features, in_features, block_rows, block_cols, _CODES[kind], number)
    task.codes, task.scale, task.zero = address(codes), address(scale), address(zero)
    task.origin, task.values = first, address(values)
    function = library().qt_dequantize_bytes

    def run(begin: int, end: int) -> int:
        part = _Bytes.from_buffer_copy(task)
        part.first, part.last = first + begin, first + end
        return int(function(ctypes.byref(part)))

    over_rows(last - first, threads, run)
    return values


def dequantize_fp4(
    codes: NDArray[np.uint8],
    scale: NDArray[np.uint8],
    scale_kind: str,
    *,
    divisor: float | None = None,
    factor: float | None = None,
    dtype: str = "float32",
    rows: tuple[int, int] | None = None,
    out: NDArray[Any] | None = None,
    threads: int | None = None,
) -> NDArray[Any]:
    """code * (scale / divisor), or scale * factor, of each weight, [out, in]; neither is one.

    codes: uint8 [out, in / 2], the first weight in the low nibble. scale: uint8 [out, groups], the
    bits of e8m0 or e4m3fn as scale_kind says; groups of 16 weights or a multiple. NVFP4 of
    compressed-tensors divides by weight_global_scale, modelopt's multiplies by weight_scale_2.
    rows, dtype, out, threads: as for `packing.dequantize`.
    """
    if scale_kind not in _SCALES:
        raise ValueError(f"scale_kind is {scale_kind!r}, expected {', '.join(_SCALES)}")
    check("codes", codes, np.uint8, (None, None))
    out_features, in_features = codes.shape[0], codes.shape[1] * 2
    check("scale", scale, np.uint8, (out_features, None))
    groups = scale.shape[1]
    if not groups or in_features % groups or in_features // groups % 16 or not in_features:
        raise ValueError(
            f"scale has {groups} groups for {in_features} columns, expected groups of 16 columns "
            "or a multiple"
        )
    if divisor is not None and factor is not None:
        raise ValueError("both divisor and factor are given, expected one of them")
    outer = 1.0 if factor is None else factor
    first, last = row_range(rows, out_features)
    number, values = _target(dtype, (last - first, in_features), out)
    function = library().qt_dequantize_fp4

    def run(begin: int, end: int) -> int:
        task = _Fp4(end - begin, in_features, in_features // groups)
        task.scale_kind, task.dtype = _SCALES[scale_kind], number
        task.divide, task.outer = divisor is not None, outer if divisor is None else divisor
        task.codes, task.scale = address(codes, first + begin), address(scale, first + begin)
        task.values = address(values, begin)
        return int(function(ctypes.byref(task)))

    over_rows(last - first, threads, run)
    return values
