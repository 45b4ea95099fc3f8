"""What blocks of GGUF stand for, in numpy float32: the definition that the kernels must equal.

The lattice types (IQ1, IQ2, IQ3) take their tables from the package gguf. Products are made in the
order of the format; every block is [blocks, bytes] and becomes [blocks, weights].
"""

from collections.abc import Callable

import gguf
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

IQ4_BOOK = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
FP4_BOOK = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _half(b: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float32)


def _bits(b: Bytes) -> Bytes:
    return np.unpackbits(b, axis=1, bitorder="little")


def _nibbles(b: Bytes) -> Bytes:
    """The low nibbles, then the high ones."""
    return np.concatenate([b & 15, b >> 4], axis=1)


def _pairs(b: Bytes, run: int = 32) -> Bytes:
    """Bit pairs: for each run of bytes the lowest pairs, then the next, ..."""
    runs = b.reshape(len(b), -1, 1, run)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (runs >> shifts & 3).reshape(len(b), -1)


def _q4_0(b: Bytes) -> Floats:
    return (_nibbles(b[:, 2:]).astype(np.float32) - 8) * _half(b, 0)


def _q4_1(b: Bytes) -> Floats:
    return _nibbles(b[:, 4:]).astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    q = _nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4
    return (q.astype(np.float32) - 16) * _half(b, 0)


def _q5_1(b: Bytes) -> Floats:
    q = _nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4
    return q.astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return b[:, 2:].view(np.int8).astype(np.float32) * _half(b, 0)


def _q1_0(b: Bytes) -> Floats:
    d = _half(b, 0)
    return np.where(_bits(b[:, 2:]) > 0, d, -d)


def _q2_0(b: Bytes) -> Floats:
    q = _pairs(b[:, 2:], run=1)
    return (q.astype(np.float32) - 1) * _half(b, 0)


def _spread(scale: Floats, weights: int) -> Floats:
    """One number for each run of weights."""
    return scale.repeat(weights, axis=1)


def _q2_k(b: Bytes) -> Floats:
    scale = (b[:, :16] & 15).astype(np.float32) * _half(b, 80)
    low = (b[:, :16] >> 4).astype(np.float32) * _half(b, 82)
    return _spread(scale, 16) * _pairs(b[:, 16:80]).astype(np.float32) - _spread(low, 16)


def _q3_k(b: Bytes) -> Floats:
    third = _bits(b[:, :32]).reshape(-1, 32, 8).transpose(0, 2, 1).reshape(-1, 256)
    low = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], axis=1)
    code = low | _pairs(b[:, 104:108], run=4) << 4
    scale = (code.astype(np.float32) - 32) * _half(b, 108)
    q = _pairs(b[:, 32:96]).astype(np.float32) - 4 * (1 - third.astype(np.float32))
    return _spread(scale, 16) * q


def _scales_minima(b: Bytes) -> tuple[Floats, Floats]:
    """Eight six-bit scales and minima of twelve bytes."""
    first, second, third = b[:, :4], b[:, 4:8], b[:, 8:12]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    low = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale.astype(np.float32), low.astype(np.float32)


def _affine_k(b: Bytes, q: Bytes) -> Floats:
    scale, low = _scales_minima(b[:, 4:16])
    scale, low = scale * _half(b, 0), low * _half(b, 2)
    return _spread(scale, 32) * q.astype(np.float32) - _spread(low, 32)


def _q4_k(b: Bytes) -> Floats:
    return _affine_k(b, _nibbles(b[:, 16:].reshape(-1, 32)).reshape(-1, 256))


def _q5_k(b: Bytes) -> Floats:
    fifth = _bits(b[:, 16:48]).reshape(-1, 32, 8).transpose(0, 2, 1).reshape(-1, 256)
    return _affine_k(b, _nibbles(b[:, 48:].reshape(-1, 32)).reshape(-1, 256) | fifth << 4)


def _q6_k(b: Bytes) -> Floats:
    low = _nibbles(b[:, :128].reshape(-1, 64)).reshape(-1, 256)
    q = (low | _pairs(b[:, 128:192]) << 4).astype(np.float32) - 32
    scale = b[:, 192:208].view(np.int8).astype(np.float32) * _half(b, 208)
    return _spread(scale, 16) * q


def _iq4_nl(b: Bytes) -> Floats:
    return IQ4_BOOK[_nibbles(b[:, 2:])] * _half(b, 0)


def _iq4_xs(b: Bytes) -> Floats:
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = _pairs(b[:, 2:4], run=1)
    scale = ((low | high << 4).astype(np.float32) - 32) * _half(b, 0)
    q = _nibbles(b[:, 8:].reshape(-1, 16)).reshape(-1, 256)
    return _spread(scale, 32) * IQ4_BOOK[q]


def _mxfp4(b: Bytes) -> Floats:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return FP4_BOOK[_nibbles(b[:, 1:])] * scale.astype(np.float32)


def _nvfp4(b: Bytes) -> Floats:
    code = b[:, :4].astype(np.int32)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 11)
    value = np.where(exponent > 0, normal, np.ldexp(mantissa.astype(np.float64), -10))
    scale = np.where(code == 0x7F, 0, value).astype(np.float32)
    q = _nibbles(b[:, 4:].reshape(-1, 8)).reshape(-1, 64)
    return FP4_BOOK[q] * _spread(scale, 16)


def _trits(b: Bytes, count: int) -> Floats:
    """The first trits of all bytes, then the second, ..."""
    powers = np.array([1, 3, 9, 27, 81][:count], np.uint16).reshape(1, -1, 1)
    rest = b[:, None, :].astype(np.uint16) * powers & 255
    return (rest * 3 >> 8).reshape(len(b), -1).astype(np.float32) - 1


def _tq1_0(b: Bytes) -> Floats:
    parts = [_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)]
    return np.concatenate(parts, axis=1) * _half(b, 52)


def _tq2_0(b: Bytes) -> Floats:
    return (_pairs(b[:, :64]).astype(np.float32) - 1) * _half(b, 64)


_OWN: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q1_0": _q1_0, "Q2_0": _q2_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
}  # fmt: skip

READ_BY_GGUF_PY = frozenset(t.name for t in gguf.quants._type_traits)


def defined(name: str) -> bool:
    """Whether dequantize() is written out here."""
    return name in _OWN


def dequantize(blocks: Bytes, name: str) -> Floats:
    """[blocks, weights] of [blocks, bytes]."""
    with np.errstate(all="ignore"):
        return _OWN[name](blocks)


def gguf_py(blocks: Bytes, name: str) -> Floats:
    """The same by the package gguf."""
    with np.errstate(all="ignore"):
        found: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    return found
