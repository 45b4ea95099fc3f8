"""What integers the blocks of a GGUF tensor hold: how often each code occurs, and block scales.

For looking at a file, not for computing with it: the order of the weights in a block does not
matter here. Types whose bits number vectors of a code book (IQ1 to IQ3) or are written to base
three (TQ1_0) have no codes of single weights. Byte grammar: told beside the kernels of each type
(kernels/gguf_dequant_simple.h and _k.h).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]  # [blocks, bytes]
# Four-bit floats by what they stand for: sign, then magnitude.
_E2M1 = (*range(15, 8, -1), 8, *range(8))


@dataclass(frozen=True)
class BlockCodes:
    """Codes of a type; `first` is what the lowest one stands for, in units of the scale.

    scale: where the block's half-precision scale is, None where there is none.
    order: codes from the lowest weight to the highest, where they are not in this order.
    """

    levels: int
    first: int
    scale: int | None
    codes: Callable[[Bytes], Bytes]
    order: tuple[int, ...] | None = None


def _nibbles(b: Bytes) -> Bytes:
    return np.concatenate([b & 15, b >> 4], axis=1)


def _pairs(b: Bytes) -> Bytes:
    return np.concatenate([b >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)


def _bits(b: Bytes) -> Bytes:
    """Bit j of byte i at 8 i + j."""
    return np.unpackbits(b, axis=1, bitorder="little")


def _fifth(b: Bytes, at: int) -> Bytes:
    """Q5_0 and Q5_1: a bit for each weight in the order of the nibbles, which lie after them."""
    return _nibbles(b[:, at + 4 : at + 20]) | _bits(b[:, at : at + 4]) << np.uint8(4)


def _q5_k(b: Bytes) -> Bytes:
    # Bit j of byte i belongs to weight i of sub-block j; a byte of nibbles to two sub-blocks.
    high = b[:, 16:48]
    parts = []
    for j in range(4):
        low = b[:, 48 + 32 * j : 80 + 32 * j]
        parts.append((low & 15) | (high >> 2 * j & 1) << 4)
        parts.append((low >> 4) | (high >> (2 * j + 1) & 1) << 4)
    return np.concatenate(parts, axis=1)


def _q3_k(b: Bytes) -> Bytes:
    high = b[:, :32]
    parts = []
    for j in range(8):
        start = 32 + 32 * (j // 4)
        low = b[:, start : start + 32] >> 2 * (j % 4) & 3
        parts.append(low | (high >> j & 1) << 2)
    return np.concatenate(parts, axis=1)


def _q6_k(b: Bytes) -> Bytes:
    parts = []
    for half in range(2):
        low, high = b[:, 64 * half : 64 * half + 64], b[:, 128 + 32 * half : 160 + 32 * half]
        for n in range(4):
            nibble = low[:, 32 * (n % 2) : 32 * (n % 2) + 32] >> 4 * (n // 2) & 15
            parts.append(nibble | (high >> 2 * n & 3) << 4)
    return np.concatenate(parts, axis=1)


CODES = {
    "Q4_0": BlockCodes(16, -8, 0, lambda b: _nibbles(b[:, 2:])),
    "Q4_1": BlockCodes(16, 0, 0, lambda b: _nibbles(b[:, 4:])),
    "Q5_0": BlockCodes(32, -16, 0, lambda b: _fifth(b, 2)),
    "Q5_1": BlockCodes(32, 0, 0, lambda b: _fifth(b, 4)),
    "Q8_0": BlockCodes(256, -128, 0, lambda b: b[:, 2:] ^ np.uint8(128)),
    "Q1_0": BlockCodes(2, 0, 0, lambda b: _bits(b[:, 2:])),
    "Q2_0": BlockCodes(4, -1, 0, lambda b: _pairs(b[:, 2:])),
    "Q2_K": BlockCodes(4, 0, 80, lambda b: _pairs(b[:, 16:80])),
    "Q3_K": BlockCodes(8, -4, 108, _q3_k),
    "Q4_K": BlockCodes(16, 0, 0, lambda b: _nibbles(b[:, 16:])),
    "Q5_K": BlockCodes(32, 0, 0, _q5_k),
    "Q6_K": BlockCodes(64, -32, 208, _q6_k),
    "IQ4_NL": BlockCodes(16, 0, 0, lambda b: _nibbles(b[:, 2:])),
    "IQ4_XS": BlockCodes(16, 0, 0, lambda b: _nibbles(b[:, 8:])),
    "TQ2_0": BlockCodes(4, -1, 64, lambda b: _pairs(b[:, :64])),
    "MXFP4": BlockCodes(16, 0, None, lambda b: _nibbles(b[:, 1:]), _E2M1),
    "NVFP4": BlockCodes(16, 0, None, lambda b: _nibbles(b[:, 4:]), _E2M1),
}


def code_counts(blocks: Bytes, name: str) -> NDArray[np.int64]:
    """How often each code occurs, from the one of the lowest weight on: int64 [levels].

    blocks: [n, bytes of a block] of the type `name`, one of CODES.
    """
    kind = CODES[name]
    counts = np.bincount(kind.codes(blocks).reshape(-1), minlength=kind.levels)
    return counts if kind.order is None else counts[list(kind.order)]


def block_scales(blocks: Bytes, name: str) -> NDArray[np.float32] | None:
    """The half-precision scale of each block, float32 [n]; None where the type has none."""
    at = CODES[name].scale
    if at is None:
        return None
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)
