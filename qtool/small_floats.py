"""Grids of small floats: FP8 and FP4, whose codes are numbers of their own.

    fp8      scale = max|w| / 448 of a row, a group, a block or the matrix
    nvfp4    outer = 448 * 6 / max|w| of the matrix, and of those that engines fuse with it;
             scale = e4m3(outer * max|w| / 6) of each group of 16
             (of MLX's, without outer: the nearest e4m3 number or one of its two neighbours,
             whichever leaves the smallest squared error)
    mxfp4    scale = 2^(floor(log2(max|w|)) - 2) of each group of 32, or twice that, whichever
    mxfp8    leaves the smaller squared error; with 8 for 2 where codes are e4m3

    code = nearest(w / scale)           code = nearest(w / (scale / outer))

A search looks further for the scale of a group that leaves the smallest squared error, its columns
weighed where that is told: among the seven e4m3 numbers up to that of max|w| and the five after
it, by which max|w| becomes 3 to 10 (4 is often best: nothing lies between it and 6), or also half
of the power of two. Scales of FP8 are what they are.

Scales are rounded to what they are stored in before any code is computed from them; numbers too
large for the largest code become it. A group that is zero throughout gets scale 1.

Sources: OCP microscaling formats (MX) 1.0, section 6.3; compressed-tensors for the two levels of
NVFP4. (MX's own rule always takes the smaller power of two, and cuts off what is over 6.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qtool import grid, native
from qtool.float_codes import LARGEST, TABLES, encode
from qtool.native import small_floats as kernel
from qtool.scheme import GroupQuant, Scheme

Floats = NDArray[np.float32]

_SMALLEST = {"bfloat16": 2.0**-126, "float32": 2.0**-126, "float16": 2.0**-24}
_CHUNK = 1 << 16  # elements worked on at once
_LARGEST_OUTER = np.float32(2.0**100)
# What is tried beside the scale of max|w|: bytes of e4m3 from it, and factors of powers of two.
_NEIGHBOURS, _FURTHER = (1, -1), tuple(step for step in range(-6, 6) if step)
_TWICE, _BOTH_WAYS = (2.0,), (2.0, 0.5)


@dataclass(frozen=True)
class Search:
    """For the scale of each group that leaves the smallest squared error."""

    importance: Floats | None = None  # [in], of a squared error in a column; None: all alike


def quantize(
    weight: Floats,
    scheme: Scheme,
    largest: float | None = None,
    search: Search | None = None,
    threads: int = 1,
) -> GroupQuant:
    """weight [out, in] to codes. largest: max|w| of all that shares one scale of the whole matrix
    with these rows; their own without. What is larger all the same becomes the largest number."""
    found = grids(weight, scheme, largest, search, threads)
    steps, width = _plain(found.row_scale()), grid.group_width(scheme, weight.shape[1])
    codes = kernel.codes_of(_plain(weight), steps, scheme.book, width, threads=threads)
    return replace(found, codes=codes)


def rounded(weight: Floats, scheme: Scheme) -> Floats:
    """quantize().dequantize(), in a fraction of the time."""
    width = grid.group_width(scheme, weight.shape[1])
    steps = _plain(grids(weight, scheme).row_scale())
    return kernel.rounded(_plain(weight), steps, scheme.book, width, threads=1)


def grids(
    weight: Floats,
    scheme: Scheme,
    largest: float | None = None,
    search: Search | None = None,
    threads: int = 1,
) -> GroupQuant:
    """quantize() without codes, which are all zero."""
    tops = _tops(weight, scheme)
    outer = None
    if scheme.rows < 0 and largest is not None:
        tops = np.full_like(tops, largest)
    if scheme.outer:
        outer = outer_of(float(tops.max(initial=0)) if largest is None else largest, scheme)
    scale = first_scales(tops, scheme, 1.0 if outer is None else outer)
    if (tries := tries_of(scheme, search is not None)) is not None:
        kernel.best_scales(
            _plain(weight), scale, scheme.book, scheme.group_size, tries,
            outer=1.0 if outer is None else outer,
            importance=None if search is None else search.importance,
            threads=threads,
        )  # fmt: skip
    return of_scales(scheme, np.zeros(weight.shape, np.uint8), scale, outer)


def first_scales(tops: Floats, scheme: Scheme, outer: float) -> Floats:
    """The scales of max|w|, of any shape."""
    if scheme.scale_dtype == "float8_e4m3":
        return _two_levels(tops, scheme, np.float32(outer))
    if scheme.scale_dtype == "e8m0":
        return _power(tops, scheme)
    scale = _stored(tops / np.float32(LARGEST[scheme.book]), scheme.scale_dtype)
    scale[tops == 0] = 1
    return scale


def outer_of(largest: float, scheme: Scheme) -> float:
    """Of two levels, what brings max|w| of all to the largest number of both; 1 where there is no
    such number, of zeros and of what is not finite, which is refused as that."""
    if not 0 < np.float32(largest) < np.inf:
        return 1.0
    with np.errstate(over="ignore"):
        ratio = np.float32(LARGEST["e4m3"] * LARGEST[scheme.book]) / np.float32(largest)
    return float(min(ratio, _LARGEST_OUTER))


def levels(quant: GroupQuant) -> native.Levels:
    """What codes of these grids stand for; a code that is no number, what the largest does."""
    book = TABLES[quant.scheme.book][: 1 << quant.scheme.bits]
    known = np.where(np.isfinite(book), book, np.float32(LARGEST[quant.scheme.book]))
    step = _plain(quant.row_scale())
    return native.Levels(grid.group_width(quant.scheme, quant.shape[1]), step, None, known)


def of_scales(
    scheme: Scheme, codes: NDArray[np.uint8], scale: Floats, outer: float | None
) -> GroupQuant:
    """Codes [out, in] and scales as they are stored."""
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


def _plain(values: Floats) -> Floats:
    return np.ascontiguousarray(values, np.float32)


def tries_of(scheme: Scheme, search: bool) -> kernel.Tries | None:
    """What is tried beside the scales of max|w|; None where these are what they are."""
    if scheme.scale_dtype == "e8m0":
        return kernel.Tries(factors=_BOTH_WAYS if search else _TWICE)
    if scheme.scale_dtype == "float8_e4m3" and (search or not scheme.outer):
        return kernel.Tries(steps=_FURTHER if search else _NEIGHBOURS)
    return None
