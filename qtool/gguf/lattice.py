"""The levels of IQ2 and IQ3, where four or eight weights share a code: a point of a lattice.

Here, too, a weight has a code of its own, of a magnitude and a sign; but the magnitudes of
neighbours are those of a point together, and in the types with `even` signs each eight weights have
an even number of negative ones, of which seven are stored. What lies where is told beside the
kernels that read it (kernels/gguf_dequant_iq.h).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.gguf_types import BY_NAME, BlockType
from qtool.native import Levels, Points

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.uint16]
Floats = NDArray[np.float32]

_PARITY = np.array([code.bit_count() % 2 for code in range(256)], np.uint8)
_SEVENS = np.arange(0, 28, 7, dtype=np.uint32)  # where a word has the signs of each eight weights


@dataclass(frozen=True)
class _Lattice:
    """How a type stores numbers of points, [blocks, points], signs, [blocks, 32], and scales,
    [blocks, 256 / width]."""

    magnitudes: tuple[int, ...]
    even: bool
    width: int  # weights that share a scale
    scale: Callable[[Bytes], Floats]
    read: Callable[[Bytes], tuple[Numbers, Bytes]]
    write: Callable[[Bytes, Numbers, Bytes], None]

    @property
    def coordinates(self) -> int:
        return 8 if len(self.magnitudes) == 3 else 4

    @property
    def bits(self) -> int:
        """Of a coordinate, where points are packed."""
        return 2 if self.coordinates == 8 else 3

    @property
    def shifts(self) -> Numbers:
        """Where a packed point has each coordinate."""
        return np.arange(self.coordinates, dtype=np.int64).astype(np.uint16) * np.uint16(self.bits)


def _scale(blocks: Bytes, code: Bytes, unit: float) -> Floats:
    """d (s + 1/2) unit"""
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    half, last = np.float32(0.5), np.float32(unit)
    scale: Floats = d * (half + code.astype(np.float32)) * last
    return scale


def _word_scale(words: Callable[[Bytes], Bytes], unit: float, blocks: Bytes) -> Floats:
    return _scale(blocks, words(blocks)[..., 3] >> np.uint8(4), unit)


def _nibble_scale(at: int, unit: float, blocks: Bytes) -> Floats:
    both = blocks[:, at:]
    return _scale(blocks, np.stack([both & 15, both >> 4], 2).reshape(len(blocks), -1), unit)


def _xxs2_points(blocks: Bytes) -> Bytes:
    return blocks[:, 2:].reshape(-1, 8, 8)[..., :4]


def _xxs2_words(blocks: Bytes) -> Bytes:
    return blocks[:, 2:].reshape(-1, 8, 8)[..., 4:]


def _xxs3_points(blocks: Bytes) -> Bytes:
    return blocks[:, 2:66].reshape(-1, 8, 8)


def _xxs3_words(blocks: Bytes) -> Bytes:
    return blocks[:, 66:].reshape(-1, 8, 4)


def _read_words(
    points: Callable[[Bytes], Bytes], words: Callable[[Bytes], Bytes], blocks: Bytes
) -> tuple[Numbers, Bytes]:
    """Points of a byte; views of them and of the words for each 32 weights, [blocks, 8, ..]."""
    word = np.ascontiguousarray(words(blocks)).view("<u4")
    signs = (word >> _SEVENS & 127).astype(np.uint8).reshape(len(blocks), 32)
    return points(blocks).reshape(len(blocks), -1).astype(np.uint16), signs


def _write_words(
    points: Callable[[Bytes], Bytes],
    words: Callable[[Bytes], Bytes],
    blocks: Bytes,
    number: Numbers,
    signs: Bytes,
) -> None:
    there, word = points(blocks), words(blocks)
    there[...] = number.reshape(there.shape)  # views: nothing else of a block changes
    seven = (signs & 127).reshape(len(blocks), 8, 4).astype(np.uint32) << _SEVENS
    scale = word[..., 3].astype(np.uint32) >> 4 << 28
    found = np.bitwise_or.reduce(seven, axis=2) | scale
    word[...] = found.astype("<u4")[..., None].view(np.uint8)


def _read_xs(blocks: Bytes) -> tuple[Numbers, Bytes]:
    both = np.ascontiguousarray(blocks[:, 2:66]).view("<u2")
    return (both & 511).astype(np.uint16), (both >> 9).astype(np.uint8)


def _write_xs(blocks: Bytes, number: Numbers, signs: Bytes) -> None:
    both = number | (signs & 127).astype(np.uint16) << 9
    blocks[:, 2:66] = both.astype("<u2").view(np.uint8)


def _read_s(high: int, bits: int, signs: int, blocks: Bytes) -> tuple[Numbers, Bytes]:
    """Eight bits of points from byte 2 on, the others in eight bytes from `high` on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    above = blocks[:, high : high + 8, None] >> shifts & ((1 << bits) - 1)
    low = blocks[:, 2 : 2 + 64 // bits]
    number = low | above.reshape(low.shape).astype(np.uint16) << 8
    return number.astype(np.uint16), blocks[:, signs : signs + 32]


def _write_s(high: int, bits: int, at: int, blocks: Bytes, number: Numbers, signs: Bytes) -> None:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    above = (number >> 8).astype(np.uint8).reshape(len(blocks), 8, -1) << shifts
    blocks[:, 2 : 2 + 64 // bits] = number & 255
    blocks[:, high : high + 8] = np.bitwise_or.reduce(above, axis=2)
    blocks[:, at : at + 32] = signs


_TWO, _THREE = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
_XXS2, _XXS3 = (_xxs2_points, _xxs2_words), (_xxs3_points, _xxs3_words)
_LATTICES = {
    "IQ2_XXS": _Lattice(
        _TWO, True, 32, partial(_word_scale, _xxs2_words, 0.25),
        partial(_read_words, *_XXS2), partial(_write_words, *_XXS2),
    ),
    "IQ2_XS": _Lattice(
        _TWO, True, 16, partial(_nibble_scale, 66, 0.25), _read_xs, _write_xs
    ),
    "IQ2_S": _Lattice(
        _TWO, False, 16, partial(_nibble_scale, 74, 0.25),
        partial(_read_s, 66, 2, 34), partial(_write_s, 66, 2, 34),
    ),
    "IQ3_XXS": _Lattice(
        _THREE, True, 32, partial(_word_scale, _xxs3_words, 0.5),
        partial(_read_words, *_XXS3), partial(_write_words, *_XXS3),
    ),
    "IQ3_S": _Lattice(
        (1, 3, 5, 7, 9, 11, 13, 15), False, 32, partial(_nibble_scale, 106, 2.0),
        partial(_read_s, 66, 1, 74), partial(_write_s, 66, 1, 74),
    ),
}  # fmt: skip

NAMES: frozenset[str] = frozenset(_LATTICES)


@cache
def _find(name: str) -> NDArray[np.int32]:
    """Numbers of points by their packed codes; below zero where there is none."""
    return native_gguf.lattice(BY_NAME[name])[0]


@cache
def points(name: str) -> Points:
    """The points of a type, in the order of their numbers."""
    lattice, find = _LATTICES[name], _find(name)
    packed = np.flatnonzero(find >= 0).astype(np.uint16)
    packed = packed[np.argsort(find[packed])]
    codes = packed[:, None] >> lattice.shifts & np.uint16((1 << lattice.bits) - 1)
    return Points(codes.astype(np.uint8), lattice.even)


def levels(blocks: Bytes, name: str, rows: int) -> Levels:
    """What the codes of blocks [blocks, bytes] of some rows stand for: code c for number c of the
    book, whose second half is the first negated."""
    lattice = _LATTICES[name]
    book = np.array([*lattice.magnitudes, *(-one for one in lattice.magnitudes)], np.float32)
    scale = lattice.scale(blocks).reshape(rows, -1)
    return Levels(lattice.width, scale, None, book, points(name))


def put(blocks: Bytes, type: BlockType, codes: Bytes) -> None:
    """codes [blocks, 256] into blocks [blocks, bytes]; ValueError where they are none of it."""
    lattice = _LATTICES[type.name]
    count = len(lattice.magnitudes)
    minus = codes >= count
    signs = np.packbits(minus, axis=1, bitorder="little")
    magnitude = (codes - minus.view(np.uint8) * np.uint8(count)).reshape(
        len(codes), -1, lattice.coordinates
    )
    packed = np.zeros(magnitude.shape[:2], np.uint16)
    for place, shift in enumerate(lattice.shifts):
        packed |= magnitude[..., place].astype(np.uint16) << shift
    number = _find(type.name)[packed]
    if (magnitude >= count).any() or (number < 0).any():
        raise ValueError(f"codes hold what is no point of {type.name}")
    if lattice.even and _PARITY[signs].any():
        raise ValueError(f"codes hold an odd number of signs, which {type.name} does not")
    lattice.write(blocks, number.astype(np.uint16), signs)


def take(blocks: Bytes, type: BlockType, codes: Bytes) -> None:
    """The inverse of put."""
    lattice = _LATTICES[type.name]
    number, signs = lattice.read(blocks)
    if lattice.even:
        signs = signs | _PARITY[signs] << np.uint8(7)
    minus = np.unpackbits(signs, axis=1, bitorder="little")
    found = points(type.name).codes[number].reshape(codes.shape)
    codes[...] = found + minus * np.uint8(len(lattice.magnitudes))
