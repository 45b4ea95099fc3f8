"""The GGUF kernels (kernels/gguf_*): blocks to floats and back, bit for bit as ggml has them."""

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
    out: NDArray[np.uint8] | None = None,
    threads: int | None = None,
) -> NDArray[np.uint8]:
    """[rows, bytes of a row]: the blocks that ggml's reference encoder makes of finite weights.

    weight: [rows, in]. importance: [in], how much the squared error of each column counts; most
    types search better scales with it, IQ2_XXS, IQ2_XS and IQ1_S do not work without. out: where
    to write, instead of a new array.
    """
    native.check("weight", weight, np.float32, (None, None))
    rows, in_features = weight.shape
    row_bytes = block.row_bytes(in_features)
    blocks = np.empty((rows, row_bytes), np.uint8) if out is None else out
    native.check("out", blocks, np.uint8, (rows, row_bytes))
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
