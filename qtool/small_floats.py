"""Grids of small floats: FP8 and FP4, whose codes are numbers of their own.

    fp8      scale = max|w| / 448 of a row, a group, a block or the matrix
    nvfp4    outer = 448 * 6 / max|w| of the matrix, and of those that engines fuse with it;
             scale = e4m3(outer * max|w| / 6) of each group of 16
             (of MLX's, without outer: the nearest e4m3 number or one of its two neighbours,
             whichever leaves the smallest squared error)
    mxfp4    scale = 2^(floor(log2(max|w|)) - 2) of each group of 32, or twice that, whichever
    mxfp8    leaves the smaller squared error; with 8 for 2 where codes are e4m3

    code = nearest(w / scale)           code = nearest(w / (scale / outer))

Scales are rounded to what they are stored in before any code is computed from them; numbers too
large for the largest code become it. A group that is zero throughout gets scale 1.

Sources: OCP microscaling formats (MX) 1.0, section 6.3; compressed-tensors for the two levels of
NVFP4. (MX's own rule always takes the smaller power of two, and cuts off what is over 6.)
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from qtool.formats.float_codes import LARGEST, TABLES, encode
from qtool.scheme import GroupQuant, Scheme

Floats = NDArray[np.float32]

_SMALLEST = {"bfloat16": 2.0**-126, "float32": 2.0**-126, "float16": 2.0**-24}
_CHUNK = 1 << 18  # elements worked on at once
_LAST = np.uint8(126)  # the byte of e4m3's largest number
_LARGEST_OUTER = np.float32(2.0**100)


def quantize(weight: Floats, scheme: Scheme, largest: float | None = None) -> GroupQuant:
    """weight [out, in] to codes. largest: max|w| of all matrices that share one scale of the whole
    matrix with this one; its own without."""
    tops = _tops(weight, scheme)
    outer = None
    if scheme.rows < 0 and largest is not None:
        tops = np.full_like(tops, max(largest, float(tops.max(initial=0))))
    if scheme.outer:
        whole = np.float32(max(largest or 0.0, float(tops.max(initial=0))))
        outer = np.float32(1)
        if whole > 0:
            with np.errstate(over="ignore"):
                ratio = np.float32(LARGEST["e4m3"] * LARGEST[scheme.book]) / whole
            outer = min(ratio, _LARGEST_OUTER)
        scale = _two_levels(tops, scheme, outer)
    elif scheme.scale_dtype == "float8_e4m3":
        scale = _two_levels(tops, scheme, np.float32(1))
        codes = _codes(weight, scheme, scale)
        byte = encode(scale, "e4m3")
        for other in (np.minimum(byte + np.uint8(1), _LAST), np.maximum(byte, 2) - np.uint8(1)):
            _better(weight, scheme, scale, codes, TABLES["e4m3"][other])
        return _quant(scheme, codes, scale, None)
    elif scheme.scale_dtype == "e8m0":
        scale = _power(tops, scheme)
        codes = _codes(weight, scheme, scale)
        _better(weight, scheme, scale, codes, scale * np.float32(2))
        return _quant(scheme, codes, scale, None)
    else:
        scale = _stored(tops / np.float32(LARGEST[scheme.book]), scheme.scale_dtype)
        scale[tops == 0] = 1
    step = scale if outer is None else scale / outer
    codes = _codes(weight, scheme, step)
    return _quant(scheme, codes, scale, None if outer is None else float(outer))


def _quant(
    scheme: Scheme, codes: NDArray[np.uint8], scale: Floats, outer: float | None
) -> GroupQuant:
    stored: NDArray[np.floating] = scale
    if scheme.scale_dtype == "float16":
        stored = scale.astype(np.float16)
    return GroupQuant(scheme, codes, stored, np.zeros(scale.shape, np.uint8), None, outer)


def _slabs(shape: tuple[int, ...], scheme: Scheme) -> Iterator[tuple[slice, slice]]:
    """Some rows at a time, and the rows of scales that belong to them; blocks are kept whole."""
    rows, columns = shape
    together = max(1, _CHUNK // columns)
    if scheme.rows > 1:
        together = scheme.rows
    for first in range(0, rows, together):
        last = min(rows, first + together)
        if scheme.rows < 0:
            yield slice(first, last), slice(0, 1)
        else:
            yield slice(first, last), slice(first // scheme.rows, -(-last // scheme.rows))


def _tops(weight: Floats, scheme: Scheme) -> Floats:
    """max|w| of everything that shares a scale, in the scales' shape."""
    rows, columns = weight.shape
    tops = np.zeros(scheme.grid((rows, columns)), np.float32)
    width = scheme.group_size if scheme.group_size > 0 else columns
    starts = np.arange(0, columns, width)
    for slab, place in _slabs((rows, columns), scheme):
        part = np.abs(weight[slab])
        if scheme.rows != 1:
            part = part.max(0, keepdims=True)
        tops[place] = np.maximum(tops[place], np.maximum.reduceat(part, starts, axis=1))
    return tops


def _stored(scale: Floats, dtype: str) -> Floats:
    """Rounded to what scales are stored in, never to zero."""
    if dtype == "bfloat16":
        word = np.ascontiguousarray(scale).view(np.uint32)
        word = word + (((word >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
        scale = (word & np.uint32(0xFFFF0000)).view(np.float32)
    elif dtype == "float16":
        scale = np.minimum(scale, np.float32(65504)).astype(np.float16).astype(np.float32)
    return np.maximum(scale, np.float32(_SMALLEST[dtype]))


def _two_levels(tops: Floats, scheme: Scheme, outer: np.float32) -> Floats:
    wanted = tops / np.float32(LARGEST[scheme.book]) * outer
    scale = TABLES["e4m3"][np.maximum(encode(wanted, "e4m3"), np.uint8(1))]
    return np.where(tops == 0, np.float32(1), scale)


def _power(tops: Floats, scheme: Scheme) -> Floats:
    """The power of two that brings max|w| to the binade of the largest code."""
    _, top = np.frexp(np.float32(LARGEST[scheme.book]))
    _, found = np.frexp(tops)
    exponent = np.where(tops == 0, 0, np.clip(found - top, -127, 126))
    return np.ldexp(np.float32(1), exponent).astype(np.float32)


def _spread(weight: Floats, scheme: Scheme, scale: Floats) -> Floats:
    """The scale of each weight of a slab: rows of scales repeated over rows and columns."""
    columns = weight.shape[1]
    width = scheme.group_size if scheme.group_size > 0 else columns
    if scale.shape[1] > 1:
        scale = np.repeat(scale, width, axis=1)[:, :columns]
    return scale


def _codes(weight: Floats, scheme: Scheme, step: Floats) -> NDArray[np.uint8]:
    codes = np.empty(weight.shape, np.uint8)
    for slab, place in _slabs(weight.shape, scheme):
        codes[slab] = encode(weight[slab] / _spread(weight[slab], scheme, step[place]), scheme.book)
    return codes


def _better(
    weight: Floats, scheme: Scheme, scale: Floats, codes: NDArray[np.uint8], others: Floats
) -> None:
    """Put other scales, and their codes, where they leave a smaller squared error."""
    table = TABLES[scheme.book]
    columns = weight.shape[1]
    starts = np.arange(0, columns, scheme.group_size)
    for slab, place in _slabs(weight.shape, scheme):
        part = weight[slab]

        def error(found: NDArray[np.uint8], spread: Floats, part: Floats = part) -> Floats:
            lost = table[found] * spread - part
            total: Floats = np.add.reduceat((lost * lost).astype(np.float64), starts, axis=1)
            return total

        small = _spread(part, scheme, scale[place])
        spread = _spread(part, scheme, others[place])
        other = encode(part / spread, scheme.book)
        gains = error(other, spread) < error(codes[slab], small)
        scale[place] = np.where(gains, others[place], scale[place])
        chosen = np.repeat(gains, scheme.group_size, axis=1)[:, :columns]
        codes[slab] = np.where(chosen, other, codes[slab])
