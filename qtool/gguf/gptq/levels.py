"""The levels that the blocks of a matrix fix, and other codes for the same blocks.

In most block types a code of a few bits chooses a weight among levels that the scale and minimum
of its sub-block fix: what a column sweep can round onto, with the rest of a block left as it is.
In IQ1, IQ2 and IQ3 those of four or eight weights depend on each other (lattice.py). Ternary types,
with two or three levels, are left out.

A layout is told as planes: so many bytes from an offset on, in runs, of which every byte holds as
many fields of `bits` bits as fit. The lowest fields of a run belong to as many weights as it has
bytes, the next to the weights after those. A code is put together from its planes. What lies where
is told beside the kernels that read it (kernels/gguf_dequant_simple.h, gguf_dequant_k.h).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.errors import UnsupportedError
from qtool.gguf.gptq import lattice
from qtool.gguf_types import BlockType
from qtool.native import Levels
from qtool.native.library import check

__all__ = ["SWEPT", "Levels", "codes_of", "levels", "put_codes", "together"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_TOGETHER = 1 << 20  # codes worked on at once: few enough to stay in a cache


@dataclass(frozen=True)
class _Plane:
    """Some bits of the codes of a block."""

    offset: int  # in the block, in bytes
    bits: int  # of a code
    run: int  # bytes
    shift: int = 0  # where in a code they belong


@dataclass(frozen=True)
class _Layout:
    """How a type stores codes, and the levels they choose among."""

    planes: tuple[_Plane, ...]
    book: Floats  # code c stands for scale * book[c] - offset
    width: int  # weights that share a scale
    scales: Callable[[Bytes], tuple[Floats, Floats | None]]  # [blocks, bytes] to scale and offset,
    # [blocks, weights of a block / width] each
    wrap: int = 0  # added to a stored code, modulo 256


def _half(blocks: Bytes, at: int) -> Floats:
    """[blocks, 1]"""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _scale(blocks: Bytes) -> tuple[Floats, None]:
    return _half(blocks, 0), None


def _scale_and_minimum(blocks: Bytes) -> tuple[Floats, Floats]:
    return _half(blocks, 0), -_half(blocks, 2)


def _q2_k(blocks: Bytes) -> tuple[Floats, Floats]:
    both = blocks[:, :16]
    scale, minimum = (both & 15).astype(np.float32), (both >> 4).astype(np.float32)
    return scale * _half(blocks, 80), minimum * _half(blocks, 82)


def _q3_k(blocks: Bytes) -> tuple[Floats, None]:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    code = np.concatenate([low & 15, low >> 4], axis=1)
    code |= np.concatenate([high >> 2 * part & 3 for part in range(4)], axis=1) << 4
    return (code.astype(np.float32) - np.float32(32)) * _half(blocks, 108), None


def _six_bits(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and minima of Q4_K and Q5_K."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimum = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return (
        scale.astype(np.float32) * _half(blocks, 0),
        minimum.astype(np.float32) * _half(blocks, 2),
    )


def _q6_k(blocks: Bytes) -> tuple[Floats, None]:
    return blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208), None


def _iq4_xs(blocks: Bytes) -> tuple[Floats, None]:
    low, high = blocks[:, 4:8].repeat(2, axis=1), blocks[:, 2:4].repeat(4, axis=1)
    place = np.arange(8, dtype=np.uint8)
    code = low >> place % 2 * 4 & 15 | (high >> place % 4 * 2 & 3) << 4
    return (code.astype(np.float32) - np.float32(32)) * _half(blocks, 0), None


def _e8m0(blocks: Bytes) -> tuple[Floats, None]:
    """Halved, since the book is doubled."""
    return np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128), None


def _ue4m3(blocks: Bytes) -> tuple[Floats, None]:
    """Halved likewise; the code 0x7f is zero, and the top bit is ignored."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 11), mantissa * 2.0**-10)
    value[0x7F] = 0
    return value.astype(np.float32)[blocks[:, :4]], None


def _whole(low: int, high: int) -> Floats:
    return np.arange(low, high + 1, dtype=np.float32)


_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# Doubled. Of the two zeros a sweep takes the first, as the encoder does.
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)

_LAYOUTS = {
    "Q4_0": _Layout((_Plane(2, 4, 16),), _whole(-8, 7), 32, _scale),
    "Q4_1": _Layout((_Plane(4, 4, 16),), _whole(0, 15), 32, _scale_and_minimum),
    "Q5_0": _Layout((_Plane(6, 4, 16), _Plane(2, 1, 1, 4)), _whole(-16, 15), 32, _scale),
    "Q5_1": _Layout((_Plane(8, 4, 16), _Plane(4, 1, 1, 4)), _whole(0, 31), 32, _scale_and_minimum),
    # Never -128, which no encoder writes: its code would be 255.
    "Q8_0": _Layout((_Plane(2, 8, 32),), _whole(-127, 127), 32, _scale, wrap=127),
    "Q2_K": _Layout((_Plane(16, 2, 32),), _whole(0, 3), 16, _q2_k),
    "Q3_K": _Layout((_Plane(32, 2, 32), _Plane(0, 1, 32, 2)), _whole(-4, 3), 16, _q3_k),
    "Q4_K": _Layout((_Plane(16, 4, 32),), _whole(0, 15), 32, _six_bits),
    "Q5_K": _Layout((_Plane(48, 4, 32), _Plane(16, 1, 32, 4)), _whole(0, 31), 32, _six_bits),
    "Q6_K": _Layout((_Plane(0, 4, 64), _Plane(128, 2, 32, 4)), _whole(-32, 31), 16, _q6_k),
    "IQ4_NL": _Layout((_Plane(2, 4, 16),), _IQ4, 32, _scale),
    "IQ4_XS": _Layout((_Plane(8, 4, 16),), _IQ4, 32, _iq4_xs),
    "MXFP4": _Layout((_Plane(1, 4, 16),), _FP4, 32, _e8m0),
    "NVFP4": _Layout((_Plane(4, 4, 8),), _FP4, 16, _ue4m3),
}

SWEPT = frozenset(_LAYOUTS) | lattice.NAMES  # names of the types that have such levels


def _layout(type: BlockType) -> _Layout:
    found = _LAYOUTS.get(type.name)
    if found is None:
        raise UnsupportedError(
            f"{type.name} has no levels that a sweep can choose among; "
            f"of the block types, these have: {', '.join([*_LAYOUTS, *sorted(lattice.NAMES)])}"
        )
    return found


def together(type: BlockType) -> int:
    """Columns that a sweep must take together: where levels depend on each other."""
    return lattice.points(type.name).together if type.name in lattice.NAMES else 1


def levels(blocks: Bytes, type: BlockType, in_features: int) -> Levels:
    """What the codes of rows of blocks stand for. blocks: [out, bytes of a row]."""
    check("blocks", blocks, np.uint8, (None, type.row_bytes(in_features)))
    if type.name in lattice.NAMES:
        return lattice.levels(blocks.reshape(-1, type.nbytes), type.name, len(blocks))
    layout = _layout(type)
    scale, offset = layout.scales(blocks.reshape(-1, type.nbytes))
    shape = (len(blocks), in_features // layout.width)
    rows = None if offset is None else offset.reshape(shape)
    return Levels(layout.width, scale.reshape(shape), rows, layout.book)


def _fields(blocks: Bytes, codes: Bytes, plane: _Plane, weights: int) -> tuple[Bytes, Bytes]:
    """Views of a plane's bytes, [blocks, runs, run], and its codes, [blocks, runs, fields, run]."""
    stored = blocks[:, plane.offset : plane.offset + weights * plane.bits // 8]
    return (
        stored.reshape(len(blocks), -1, plane.run),
        codes.reshape(len(blocks), -1, 8 // plane.bits, plane.run),
    )


def _parts(blocks: Bytes, type: BlockType, codes: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """Views of some blocks at a time, [some, bytes], and of their codes, [some, weights]."""
    rows, in_features = codes.shape
    check("blocks", blocks, np.uint8, (rows, type.row_bytes(in_features)))
    check("codes", codes, np.uint8, (rows, in_features))
    flat, all_codes = blocks.reshape(-1, type.nbytes), codes.reshape(-1, type.weights)
    together = _TOGETHER // type.weights
    for first in range(0, len(flat), together):
        yield flat[first : first + together], all_codes[first : first + together]


def put_codes(blocks: Bytes, type: BlockType, codes: Bytes) -> None:
    """Replace the codes of rows of blocks in place; code c stands for number c of the book.

    blocks: [out, bytes of a row]. codes: [out, in], below the size of the book, and where levels
    depend on each other, such as may stand together (ValueError).
    """
    if type.name in lattice.NAMES:
        for some, part in _parts(blocks, type, codes):
            lattice.put(some, type, part)
        return
    layout = _layout(type)
    for some, part in _parts(blocks, type, codes):
        wrapped = part - np.uint8(layout.wrap) if layout.wrap else part
        for plane in layout.planes:
            to, fields = _fields(some, wrapped, plane, type.weights)
            mask = np.uint8((1 << plane.bits) - 1)
            found = fields[:, :, 0] >> plane.shift & mask
            for place in range(1, 8 // plane.bits):
                found |= (fields[:, :, place] >> plane.shift & mask) << plane.bits * place
            to[...] = found


def codes_of(blocks: Bytes, type: BlockType, in_features: int) -> Bytes:
    """[out, in], the codes that rows of blocks [out, bytes of a row] hold."""
    codes = np.zeros((len(blocks), in_features), np.uint8)
    if type.name in lattice.NAMES:
        for some, part in _parts(blocks, type, codes):
            lattice.take(some, type, part)
        return codes
    layout = _layout(type)
    for some, part in _parts(blocks, type, codes):
        for plane in layout.planes:
            stored, fields = _fields(some, part, plane, type.weights)
            mask = np.uint8((1 << plane.bits) - 1)
            for place in range(8 // plane.bits):
                fields[:, :, place] |= (stored >> plane.bits * place & mask) << plane.shift
        part += np.uint8(layout.wrap)
    return codes
