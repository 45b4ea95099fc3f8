"""Small floats as bits: e4m3 and e5m2 in a byte, e2m1 in four bits, and e8m0, a power of two.

    e4m3 (OFP8 E4M3FN)   s eeee mmm, bias 7; no infinities, 0x7f and 0xff are NaN, largest 448
    e5m2 (OFP8 E5M2)     s eeeee mm, bias 15; infinities and NaN as in float16, largest 57344
    e2m1 (MXFP4)         s ee m: 0 1/2 1 3/2 2 3 4 6, and their negatives
    e8m0 (MX scales)     2^(byte - 127); 255 is NaN

Numbers are rounded to nearest, ties to even, and what is too large becomes the largest.

Sources: OCP 8-bit floating point (OFP8) 1.0; OCP microscaling formats (MX) 1.0.
"""

import numpy as np
from numpy.typing import NDArray

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
_LAYOUT = {"e4m3": (3, 7), "e5m2": (2, 15), "e2m1": (1, 1)}  # bits of mantissa, bias
_CHUNK = 1 << 18  # elements worked on at once: temporaries stay in the cache


def _table(book: str) -> NDArray[np.float32]:
    """The numbers of all 256 bytes; of e2m1 those of the low four bits."""
    mantissa_bits, bias = _LAYOUT[book]
    sign_bit = 8 if book == "e2m1" else 128
    byte = np.arange(256) & (2 * sign_bit - 1)
    magnitude = byte & (sign_bit - 1)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - bias),
        np.ldexp(1 + fraction, exponent - bias),
    )
    if book == "e4m3":
        value[magnitude == 127] = np.nan
    if book == "e5m2":
        value[magnitude == 124] = np.inf
        value[magnitude > 124] = np.nan
    return np.where(byte & sign_bit, -value, value).astype(np.float32)


TABLES: dict[str, NDArray[np.float32]] = {book: _table(book) for book in _LAYOUT}
E8M0: NDArray[np.float32] = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(
    np.float32
)
# The bytes of e4m3 that spell the numbers of e2m1: all of them are there.
E2M1_AS_E4M3: NDArray[np.uint8] = np.array(
    [int(np.searchsorted(TABLES["e4m3"][:127], TABLES["e2m1"][k & 7])) | (k & 8) << 4
     for k in range(16)], np.uint8
)  # fmt: skip


def encode(values: NDArray[np.float32], book: str) -> NDArray[np.uint8]:
    """The nearest codes of finite numbers, uint8 of the same shape."""
    codes = np.empty(values.shape, np.uint8)
    flat, out = np.ascontiguousarray(values, np.float32).reshape(-1), codes.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        out[part] = _encode(flat[part], book)
    return codes


def _encode(values: NDArray[np.float32], book: str) -> NDArray[np.uint8]:
    mantissa_bits, bias = _LAYOUT[book]
    rounded = np.abs(nearest(values, book))
    large = rounded.view(np.uint32) >> np.uint32(23 - mantissa_bits)
    large -= np.uint32((127 - bias) << mantissa_bits)
    # Below 2^(1 - bias) steps are equal.
    small = (rounded * np.float32(2.0 ** (mantissa_bits + bias - 1))).astype(np.uint32)
    code = np.where(rounded < np.float32(2.0 ** (1 - bias)), small, large)
    sign = np.signbit(values).astype(np.uint32) << np.uint32(3 if book == "e2m1" else 7)
    found: NDArray[np.uint8] = (code | sign).astype(np.uint8)
    return found


def nearest(values: NDArray[np.float32], book: str) -> NDArray[np.float32]:
    """The numbers whose codes encode() gives, of the same shape and of the same signs."""
    mantissa_bits, bias = _LAYOUT[book]
    found: NDArray[np.float32] = np.clip(values, -LARGEST[book], LARGEST[book], dtype=np.float32)
    bits = found.view(np.uint32)
    unit = bits & np.uint32(0x7F800000)  # the power of two below each, or that of the smallest
    np.maximum(unit, np.uint32(128 - bias << 23), out=unit)
    # So many of it, added and subtracted, leave as many bits of the mantissa.
    much = unit.view(np.float32)
    much *= np.float32(1.5 * 2.0 ** (23 - mantissa_bits))
    found += much
    found -= much
    np.bitwise_and(values.view(np.uint32), np.uint32(0x80000000), out=unit)
    bits |= unit
    return found


def exponent(scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The e8m0 bytes of powers of two; of other numbers, those of the power below."""
    _, found = np.frexp(scale)
    byte: NDArray[np.uint8] = np.clip(found + 126, 0, 254).astype(np.uint8)
    return byte


def decode_scale(stored: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The scales that bytes spell; dtype: float8_e4m3 or e8m0."""
    return (E8M0 if dtype == "e8m0" else TABLES["e4m3"])[stored]


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Four-bit codes [out, in] in bytes [out, in / 2], the first in the low nibble."""
    packed: NDArray[np.uint8] = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return packed


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse."""
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=codes[:, 0::2])
    np.right_shift(packed, np.uint8(4), out=codes[:, 1::2])
    return codes
