"""Codes of 2 to 8 bits as a little-endian bitstream in 32-bit words.

Code i of a run occupies bits b*i .. b*i + b - 1, counted from the least significant bit of the
first word; a code may straddle two words:

    stream = sum(codes[i] << (b * i)),   word j = (stream >> (32 * j)) mod 2^32

This is the order of GPTQ's qweight and qzeros for every width (its 3-bit loop "10, 1, 10, 1, 10"
unrolls the same stream) and, with codes put in another order first, of AWQ's.

Eight codes fill b bytes exactly, so the arithmetic runs on 64-bit lanes of eight codes: pairs of
8-bit codes become 2b bits in 16-bit lanes, those 4b bits in 32-bit lanes, those 8b bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


WORD = 32
_LANES = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))
# A tile of the transpose: 64 lines of cache on either side.
_TILE = 1024
_AT_ONCE = 1 << 18  # codes


def word_count(count: int, bits: int) -> int:
    """Words that hold `count` codes."""
    return -(-count * bits // WORD)


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack along the last axis: uint8 [..., n] -> int32 [..., ceil(n * bits / 32)].

    FormatError where a code needs more than `bits` bits.
    """
    if codes.size and int(codes.max()) >> bits:
        raise FormatError(f"the code {int(codes.max())} does not fit {bits} bits")
    *lead, count = codes.shape
    rows = codes.reshape(math.prod(lead), count)
    words = np.empty((len(rows), word_count(count, bits)), "<i4")
    for part in _pieces(len(rows), count):
        words[part] = _pack(rows[part], bits)
    return words.reshape(*lead, words.shape[1])


def unpack(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """The inverse: 32-bit words [..., w] -> uint8 [..., count]."""
    *lead, have = words.shape
    if have != word_count(count, bits):
        expected = word_count(count, bits)
        raise FormatError(f"{have} words for {count} codes of {bits} bits; expected {expected}")
    rows = words.reshape(math.prod(lead), have)
    codes = np.empty((len(rows), count), np.uint8)
    for part in _pieces(len(rows), count):
        codes[part] = _unpack(rows[part], bits, count)
    return codes.reshape(*lead, count)


def _pieces(rows: int, count: int) -> Iterator[slice]:
    """Some rows at a time, whose temporaries stay in the cache."""
    step = max(1, _AT_ONCE // max(1, count))
    return (slice(first, first + step) for first in range(0, rows, step))


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """[rows, n] -> [rows, ceil(n * bits / 32)]"""
    rows, count = codes.shape
    eights = -(-count // 8)
    padded = np.zeros((rows, eights * 8), np.uint8)
    padded[:, :count] = codes
    lanes = padded.view("<u8")
    for width, mask in _LANES:
        # Two neighbours of b * width / 8 bits each, `width` bits apart, move together.
        shift = np.uint64(width - bits * width // 8)
        high = (lanes >> shift) & np.uint64(~mask & (2**64 - 1)) >> shift
        lanes &= np.uint64(mask)
        lanes |= high
    stream = lanes.view(np.uint8).reshape(rows, eights, 8)[..., :bits]
    words = word_count(count, bits)
    filled = np.zeros((rows, max(words * 4, eights * bits)), np.uint8)
    filled[:, : eights * bits] = stream.reshape(rows, eights * bits)
    return np.ascontiguousarray(filled[:, : words * 4]).view("<i4")


def _unpack(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """[rows, w] -> [rows, count]"""
    rows, eights = len(words), -(-count // 8)
    raw = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    if bits == 8:
        return raw[:, :count]
    stream = np.zeros((rows, eights * bits), np.uint8)
    used = min(raw.shape[1], eights * bits)
    stream[:, :used] = raw[:, :used]
    spread = np.zeros((rows, eights, 8), np.uint8)
    spread[..., :bits] = stream.reshape(rows, eights, bits)
    lanes = spread.reshape(rows, eights * 8).view("<u8")
    for width, _ in reversed(_LANES):
        held = bits * width // 8
        shift = np.uint64(width - held)
        low_mask = sum(((1 << held) - 1) << at for at in range(0, 64, 2 * width))
        high_mask = low_mask << held
        high = (lanes & np.uint64(high_mask)) << shift
        lanes &= np.uint64(low_mask)
        lanes |= high
    return lanes.view(np.uint8)[:, :count]


def transpose(matrix: NDArray[Any]) -> NDArray[Any]:
    """A contiguous transposed copy, made tile by tile so that both sides stay in the cache."""
    rows, columns = matrix.shape
    out = np.empty((columns, rows), matrix.dtype)
    for row in range(0, rows, _TILE):
        for column in range(0, columns, _TILE):
            tile = matrix[row : row + _TILE, column : column + _TILE]
            out[column : column + _TILE, row : row + _TILE] = tile.T
    return out


def pack_rows(codes: NDArray[np.uint8], order: tuple[int, ...]) -> NDArray[np.int32]:
    """4-bit codes of eight neighbouring rows in one word: uint8 [n, m] -> int32 [n / 8, m].

    Nibble i of a word is row order[i] of its eight. Packing rows before a transpose moves an
    eighth of what transposing codes would.
    """
    if codes.size and int(codes.max()) > 15:
        raise FormatError(f"the code {int(codes.max())} does not fit 4 bits")
    rows, columns = codes.shape
    eights = codes.reshape(rows // 8, 8, columns)
    planes = np.empty((rows // 8, columns, 4), np.uint8)
    for byte in range(4):
        low, high = eights[:, order[2 * byte]], eights[:, order[2 * byte + 1]]
        planes[..., byte] = low | high << np.uint8(4)
    return planes.reshape(rows // 8, columns * 4).view("<i4")


def unpack_rows(words: NDArray[Any], order: tuple[int, ...]) -> NDArray[np.uint8]:
    """The inverse: int32 [n / 8, m] -> uint8 [n, m]."""
    eighth, columns = words.shape
    raw = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    planes = raw.reshape(eighth, columns, 4)
    codes = np.empty((eighth, 8, columns), np.uint8)
    for byte in range(4):
        plane = np.ascontiguousarray(planes[..., byte])
        np.bitwise_and(plane, np.uint8(15), out=codes[:, order[2 * byte]])
        np.right_shift(plane, np.uint8(4), out=codes[:, order[2 * byte + 1]])
    return codes.reshape(eighth * 8, columns)


def reorder(codes: NDArray[np.uint8], order: tuple[int, ...]) -> NDArray[np.uint8]:
    """Permute every run of len(order) along the last axis: out[..., i] = in[..., order[i]]."""
    runs = codes.reshape(*codes.shape[:-1], -1, len(order))
    out = np.empty_like(runs)
    for place, source in enumerate(order):
        out[..., place] = runs[..., source]
    return out.reshape(codes.shape)


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    return tuple(order.index(i) for i in range(len(order)))
