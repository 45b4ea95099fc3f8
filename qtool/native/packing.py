"""Codes of 2 to 8 bits between bytes and 32-bit words, and from words to floats.

A matrix of codes [out, in] lies in words in one of these layouts:

    rows       [out, ceil(in * bits / 32)]     a row is a little-endian stream (GEMV,
                                               compressed-tensors)
    columns    [ceil(in * bits / 32), out]     the same, transposed (GPTQ)
    across     [in, out / 8], 4 bits           nibble i of word c is output 8c + order[i] (AWQ GEMM)
    padded     [out, ceil(in / n)]             n = 32 // bits codes in each word, none across two
                                               (compressed-tensors before 0.17)
    strips     [out / 4, in / 2], 4 bits       for each 64 inputs 16 half words of each of the four
                                               rows, 8 for each 32: nibble j of half word m is input
                                               8j + m of them (GEMV-fast, llm-awq)

Words need no alignment; bfloat16 travels as its bits in uint16.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.native.floats import from_bfloat16
from qtool.native.library import address, aligned, check, library, over_rows

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_LAYOUTS = {"rows": 0, "columns": 1, "across": 2, "padded": 3, "strips": 4}
_TOGETHER = {"across": 8, "strips": 4}  # rows that share words
DTYPES = {"float32": (0, np.float32), "float16": (1, np.float16), "bfloat16": (2, np.uint16)}


class _Packing(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("origin", ctypes.c_int64),
        ("layout", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("order", ctypes.c_uint8 * 8),
        ("words", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
    )


class _Dequantizing(ctypes.Structure):
    _fields_ = (
        ("packing", _Packing),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("g_idx", ctypes.c_void_p),
        ("group_size", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("values", ctypes.c_void_p),
    )


def words_shape(shape: tuple[int, int], bits: int, layout: str) -> tuple[int, int]:
    """Shape of the words that hold codes [out, in]; ValueError where the layout cannot."""
    out_features, in_features = shape
    if layout not in _LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected {', '.join(_LAYOUTS)}")
    if not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits}, expected 2 to 8")
    if out_features < 1 or in_features < 1:
        raise ValueError(f"codes have shape {shape}, expected at least one element")
    if layout in _TOGETHER:
        rows, columns = _TOGETHER[layout], 64 if layout == "strips" else 1
        if bits != 4 or out_features % rows or in_features % columns:
            wanted = f"a multiple of {rows} rows" + (" and of 64 columns" if columns > 1 else "")
            raise ValueError(
                f"{bits} bits and shape {shape}; the layout {layout} takes 4 bits and {wanted}"
            )
        if layout == "across":
            return in_features, out_features // 8
        return out_features // 4, in_features // 2
    if layout == "padded":
        return out_features, -(-in_features // (32 // bits))
    words = -(-in_features * bits // 32)
    return (out_features, words) if layout == "rows" else (words, out_features)


def _packing(
    shape: tuple[int, int],
    bits: int,
    layout: str,
    order: tuple[int, ...],
    words: NDArray[np.int32],
    codes: NDArray[np.uint8] | None = None,
    origin: int = 0,
) -> _Packing:
    if sorted(order) != list(range(8)):
        raise ValueError(f"order is {order}, expected a permutation of 0 .. 7")
    order_bytes = (ctypes.c_uint8 * 8)(*order)
    return _Packing(
        *shape, 0, 0, origin, _LAYOUTS[layout], bits, order_bytes, address(words), address(codes)
    )


def _of_rows(packing: _Packing, first: int, last: int) -> _Packing:
    """The same with a range of rows to work on, counted from where its codes begin."""
    part = _Packing.from_buffer_copy(packing)
    part.first, part.last = part.origin + first, part.origin + last
    return part


def row_range(rows: tuple[int, int] | None, out_features: int) -> tuple[int, int]:
    """(first, last) of a range that lies in the matrix; ValueError else."""
    first, last = (0, out_features) if rows is None else rows
    if not 0 <= first <= last <= out_features:
        raise ValueError(f"rows are {first} to {last} of a matrix of {out_features}")
    return first, last


def pack(
    codes: NDArray[np.uint8],
    bits: int,
    layout: str,
    order: tuple[int, ...] = AWQ_ORDER,
    threads: int | None = None,
    *,
    out: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Words of codes [out, in]. `order` is for the layout across alone. out: where to write.

    ValueError where a code needs more bits.
    """
    check("codes", codes, np.uint8, (None, None))
    shape = (codes.shape[0], codes.shape[1])
    wanted = words_shape(shape, bits, layout)
    words = aligned(wanted, np.int32) if out is None else check("out", out, np.int32, wanted)
    packing = _packing(shape, bits, layout, order, words, codes)
    function = library().qt_pack
    over_rows(
        shape[0],
        threads,
        lambda first, last: int(function(ctypes.byref(_of_rows(packing, first, last)))),
        refused=f"a code does not fit {bits} bits",
    )
    return words


def unpack(
    words: NDArray[np.int32],
    shape: tuple[int, int],
    bits: int,
    layout: str,
    threads: int | None = None,
    *,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """The inverse: codes uint8 of this shape [out, in]. out: where to write."""
    check("words", words, np.int32, words_shape(shape, bits, layout))
    codes = aligned(shape, np.uint8) if out is None else check("out", out, np.uint8, shape)
    packing = _packing(shape, bits, layout, AWQ_ORDER, words, codes)
    function = library().qt_unpack
    over_rows(
        shape[0],
        threads,
        lambda first, last: int(function(ctypes.byref(_of_rows(packing, first, last)))),
    )
    return codes


def wide_scale(scale: NDArray[Any]) -> NDArray[np.float32]:
    """float32 of scales in float16, bfloat16 (uint16) or float32; itself if it is that already."""
    if scale.dtype == np.uint16:
        scale = from_bfloat16(np.ascontiguousarray(scale))
    elif scale.dtype == np.float16:
        scale = scale.astype(np.float32)
    return np.require(scale, requirements=["C", "A"])


def dequantize(
    words: NDArray[np.int32],
    shape: tuple[int, int],
    bits: int,
    layout: str,
    *,
    scale: NDArray[Any],
    zero: NDArray[np.uint8],
    group_size: int,
    g_idx: NDArray[np.int32] | None = None,
    order: tuple[int, ...] = AWQ_ORDER,
    dtype: str = "float32",
    rows: tuple[int, int] | None = None,
    out: NDArray[Any] | None = None,
    threads: int | None = None,
) -> NDArray[Any]:
    """(code - zero) * scale of each weight, [out, in].

    scale: float16, bfloat16 (uint16) or float32 [out, groups]; zero: uint8 [out, groups]; g_idx:
    int32 [in], the group of each column, column // group_size without. dtype: float32, or rounded
    from it to float16 or bfloat16 (whose bits come as uint16). rows: (first, last) of the rows
    wanted, all without. out: where to write, instead of a new array.
    """
    out_features, in_features = shape
    check("words", words, np.int32, words_shape(shape, bits, layout))
    size = in_features if group_size == -1 else group_size
    if size < 1:
        raise ValueError(f"group_size is {group_size}, expected -1 or at least 1")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected {', '.join(DTYPES)}")
    scale = wide_scale(scale)
    check("scale", scale, np.float32, (out_features, None))
    groups = scale.shape[1]
    check("zero", zero, np.uint8, (out_features, groups))
    if g_idx is not None:
        check("g_idx", g_idx, np.int32, (in_features,))
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            raise ValueError(
                f"g_idx has {g_idx.min()} to {g_idx.max()}, expected 0 to {groups - 1}"
            )
        g_idx = np.require(g_idx, requirements="A")
    elif groups != -(-in_features // size):
        raise ValueError(
            f"scale has {groups} groups, expected {-(-in_features // size)} for {in_features} "
            f"columns in groups of {size}"
        )
    first, last = row_range(rows, out_features)
    together = _TOGETHER.get(layout, 1)
    if first % together or last % together:
        # Words hold neighbours too: those come along, and are left out of what is returned.
        wide = (first - first % together, -(-last // together) * together)
        options: dict[str, Any] = {"group_size": group_size, "g_idx": g_idx, "order": order}
        options |= {"dtype": dtype, "rows": wide, "threads": threads}
        found = dequantize(words, shape, bits, layout, scale=scale, zero=zero, **options)
        found = found[first - wide[0] : last - wide[0]]
        if out is None:
            return found
        check("out", out, found.dtype, found.shape)[:] = found
        return out
    number, numpy_dtype = DTYPES[dtype]
    wanted = (last - first, in_features)
    values = aligned(wanted, numpy_dtype) if out is None else check("out", out, numpy_dtype, wanted)
    packing = _packing(shape, bits, layout, order, words, origin=first)
    function = library().qt_dequantize

    def run(begin: int, end: int) -> int:
        task = _Dequantizing(
            _of_rows(packing, begin, end),
            address(scale),
            address(zero),
            address(g_idx),
            size,
            groups,
            number,
            0,
            address(values),
        )
        return int(function(ctypes.byref(task)))

    over_rows(last - first, threads, run)
    return values
