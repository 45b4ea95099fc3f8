"""libggml-base through ctypes: what llama.cpp itself makes of a matrix and of blocks.

The library is the oracle of the GGUF kernels. It is built apart from this repository (target
ggml-base of llama.cpp, no -march flag), and named by QTOOL_ORACLE_GGML.
"""

import ctypes
import faulthandler
import mmap
import os
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from qtool.gguf_types import BlockType

_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _TO_FLOAT),
    )


def path() -> str | None:
    """Where the library is, if the environment says so."""
    return os.environ.get("QTOOL_ORACLE_GGML")


@cache
def _library() -> ctypes.CDLL:
    named = path()
    assert named is not None
    os.environ["GGML_NO_BACKTRACE"] = "1"
    library = ctypes.CDLL(named)
    library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = (
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    )
    return library


def traits(block: BlockType) -> _Traits:
    """Name, weights and bytes of a block as ggml has them."""
    found: _Traits = _library().ggml_get_type_traits(block.number).contents
    return found


def dequantize(blocks: NDArray[np.uint8], block: BlockType, weights: int) -> NDArray[np.float32]:
    """The weights, one after the other."""
    out = np.empty(weights, np.float32)
    traits(block).to_float(blocks.ctypes.data, out.ctypes.data, weights)
    return out


def encode(
    weight: NDArray[np.float32], block: BlockType, importance: NDArray[np.float32] | None
) -> NDArray[np.uint8] | None:
    """[rows, bytes of a row]; None where ggml aborts.

    The searches of the lattice types can end beside their lattice, which ends the process; so each
    call has a process of its own.
    """
    rows, in_features = weight.shape
    size = rows * block.row_bytes(in_features)
    shared = mmap.mmap(-1, max(1, size))
    _library().ggml_quantize_init(block.number)  # slow, once: not in every child
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        at = None if importance is None else importance.ctypes.data
        out = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        _library().ggml_quantize_chunk(
            block.number, weight.ctypes.data, out, 0, rows, in_features, at
        )
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        return None
    return np.frombuffer(shared, np.uint8, size).reshape(rows, -1)


def encoder(
    block: BlockType,
    in_features: int,
    importance: NDArray[np.float32] | None,
    blocks: NDArray[np.uint8],
) -> Callable[[NDArray[np.float32]], object]:
    """encode(weight) into `blocks` in this process, for timing: ggml may abort on odd weights."""
    _library().ggml_quantize_init(block.number)
    at = None if importance is None else importance.ctypes.data

    def run(weight: NDArray[np.float32]) -> object:
        given, out = weight.ctypes.data, blocks.ctypes.data
        size = (len(weight), in_features)
        return _library().ggml_quantize_chunk(block.number, given, out, 0, *size, at)

    return run
