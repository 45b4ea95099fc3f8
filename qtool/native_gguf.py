"""The GGUF kernels (kernels/gguf_*): blocks to floats and back, bit for bit as ggml has them."""

import ctypes
from ctypes import c_int64 as _i64
from ctypes import c_void_p as _pointer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.gguf_types import BlockType
from qtool.native import library as native

_DTYPES = {"float32": (0, np.float32), "float16": (1, np.float16), "bfloat16": (2, np.uint16)}


def dequantize(
    blocks: NDArray[np.uint8],
    block: BlockType,
    in_features: int,
    dtype: str = "float32",
    *,
    out: NDArray[Any] | None = None,
    threads: int | None = None,
) -> NDArray[Any]:
    """[rows, in_features] of what rows of blocks stand for; bfloat16 as its bits in uint16.

    blocks: [rows, bytes of a row]. out: where to write, instead of a new array.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected {', '.join(_DTYPES)}")
    number, numpy_dtype = _DTYPES[dtype]
    row_bytes = block.row_bytes(in_features)
    native.check("blocks", blocks, np.uint8, (None, row_bytes))
    rows = len(blocks)
    if out is None:
        out = np.empty((rows, in_features), numpy_dtype)
    native.check("out", out, numpy_dtype, (rows, in_features))
    function = native.library().qt_gguf_dequantize
    row_blocks = in_features // block.weights

    def run(first: int, last: int) -> int:
        from_, to = native.address(blocks, first), native.address(out, first)
        count = (last - first) * row_blocks
        return int(function(block.number, number, _i64(count), _pointer(from_), _pointer(to)))

    native.over_rows(rows, threads, run)
    return out


def encode(
    weight: NDArray[np.float32],
    block: BlockType,
    importance: NDArray[np.float32] | None = None,
    *,
    threads: int | None = None,
) -> NDArray[np.uint8]:
    """[rows, bytes of a row]: the blocks that ggml's reference encoder makes of finite weights.

    weight: [rows, in]. importance: [in], how much the squared error of each column counts; most
    types search better scales with it, IQ2_XXS, IQ2_XS and IQ1_S do not work without.
    """
    native.check("weight", weight, np.float32, (None, None))
    rows, in_features = weight.shape
    blocks = np.empty((rows, block.row_bytes(in_features)), np.uint8)
    if importance is not None:
        native.check("importance", importance, np.float32, (in_features,))
    elif block.needs_importance:
        raise ValueError(f"{block.name} needs importance weights")
    function = native.library().qt_gguf_encode
    importance_at = _pointer(native.address(importance))

    def run(first: int, last: int) -> int:
        from_, to = native.address(weight, first), native.address(blocks, first)
        size = (_i64(last - first), _i64(in_features))
        return int(function(block.number, *size, _pointer(from_), importance_at, _pointer(to)))

    native.over_rows(rows, threads, run)
    return blocks


def lattice(block: BlockType) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
    """The lattice of IQ1 to IQ3 as kernels/gguf_lattice.h has it: `find` [65536], and `near`."""
    find, near, count = _pointer(), _pointer(), _i64()
    code = native.library().qt_gguf_lattice(
        block.number, ctypes.byref(find), ctypes.byref(near), ctypes.byref(count)
    )
    if code == 2:
        raise MemoryError("the kernel library could not allocate its buffers")
    if code != 0 or not find.value or not near.value:
        raise ValueError(f"{block.name} is encoded on no lattice")
    points = (ctypes.c_int32 * 65536).from_address(find.value)
    lists = (ctypes.c_uint16 * count.value).from_address(near.value)
    return np.array(points, np.int32), np.array(lists, np.uint16)


class _Piece(ctypes.Structure):
    _fields_ = (
        ("from_type", ctypes.c_int32),
        ("to_type", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("from_", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("back", ctypes.c_void_p),
        ("size", ctypes.c_double),
        ("lost", ctypes.c_double),
    )


def convert(
    raw: NDArray[np.uint8],
    have: BlockType,
    want: BlockType | None,
    in_features: int,
    importance: NDArray[np.float32] | None,
    out: NDArray[np.uint8] | None,
    scratch: NDArray[np.float32],
) -> tuple[float, float]:
    """Rows of one type to another, on this thread: sums of squared weights and of squared losses.

    raw: [rows, bytes of a row]. want: None only sums, else `out` is written: [rows, its bytes of a
    row]. importance: [in], as for `encode`. scratch: room for two rows at least. Rows are taken a
    few at a time, as many as `scratch` holds. Where the first sum is not finite a weight is not,
    and `out` is not complete; where the second is not, a weight does not fit `want`.
    """
    native.check("raw", raw, np.uint8, (None, have.row_bytes(in_features)))
    native.check("scratch", scratch, np.float32, (None,))
    if want is not None:
        assert out is not None
        native.check("out", out, np.uint8, (len(raw), want.row_bytes(in_features)))
        if importance is not None:
            native.check("importance", importance, np.float32, (in_features,))
        elif want.needs_importance:
            raise ValueError(f"{want.name} needs importance weights")
    step = scratch.size // (2 * in_features)
    values = native.address(scratch) or 0
    piece = _Piece(
        have.number,
        (want or have).number,
        len(raw),
        in_features,
        step,
        native.address(raw),
        native.address(out) if want is not None else None,
        native.address(importance),
        values,
        values + 4 * step * in_features,
    )
    code = int(native.library().qt_gguf_convert(ctypes.byref(piece)))
    if code == 2:
        raise MemoryError("the kernel library could not allocate its buffers")
    if code != 0:
        raise ValueError("the kernel library refused an argument")
    return piece.size, piece.lost
