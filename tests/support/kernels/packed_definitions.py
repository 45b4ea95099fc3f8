"""Stored weights to floats by their definitions, in a few lines of numpy each."""

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def random_bits(seed: int, shape: tuple[int, ...], dtype: type) -> NDArray[np.generic]:
    """Every pattern of bits is as likely."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.PCG64(seed).random_raw(-(-size // 8)).view(np.uint8)[:size]
    return raw.view(dtype).reshape(shape).copy()


def fields(words: NDArray[np.generic], starts: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Bits start .. start + bits - 1 of each row of words, read as one little-endian number."""
    as_bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return sum(as_bits[:, starts + bit] << np.uint8(bit) for bit in range(bits))


def codes(words: NDArray[np.generic], shape: tuple[int, int], bits: int, layout: str):
    """uint8 [out, in] of words in a layout of qtool.native.packing."""
    rows, columns = shape
    found = np.zeros(shape, np.uint8)
    if layout == "columns":
        words, layout = np.ascontiguousarray(words.T), "rows"
    column, each = np.arange(columns), 32 // bits
    if layout == "rows":
        return fields(words, column * bits, bits)
    if layout == "padded":
        return fields(words, 32 * (column // each) + bits * (column % each), bits)
    for k in range(columns):
        if layout == "across":
            nibbles = (
                words[k].view(np.uint32)[:, None] >> (4 * np.arange(8, dtype=np.uint32))
            ) & 15
            found[np.arange(rows).reshape(-1, 8)[:, AWQ_ORDER], k] = nibbles
        else:
            halves = np.ascontiguousarray(words).view(np.uint16).reshape(rows // 4, -1, 4, 2, 8)
            strip, run, j, m = k // 64, k // 32 % 2, k // 8 % 4, k % 8
            found[:, k] = (halves[:, strip, :, run, m] >> (4 * j) & 15).reshape(rows)
    return found


def float8(codes: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """OFP8: sign, exponent and mantissa taken apart; subnormals have no leading one."""
    wide, bias = (3, 7) if kind == "float8_e4m3fn" else (2, 15)
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = (codes & 127) >> wide, (codes & ((1 << wide) - 1)) / (1 << wide)
    value = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias),
        (1 + mantissa) * 2.0 ** (exponent.astype(np.float64) - bias),
    )
    if kind == "float8_e4m3fn":
        value = np.where((codes & 127) == 127, np.nan, value)
    else:
        value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)
    return (sign * value).astype(np.float32)


def e8m0(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.where(codes == 255, np.nan, 2.0 ** (codes.astype(np.float64) - 127)).astype(
        np.float32
    )


def float4(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """E2M1, two a byte, the first in the low nibble."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    return np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])


def bfloat16_of(exact: NDArray[np.float32]) -> NDArray[np.uint16]:
    word = exact.view(np.uint32).astype(np.uint64)
    rounded = ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(exact), np.uint16(0x7FC0), rounded)


def stored(exact: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """float32 rounded to nearest even."""
    if dtype == "bfloat16":
        return bfloat16_of(np.ascontiguousarray(exact))
    with np.errstate(all="ignore"):
        return exact.astype(DTYPES[dtype])


def same(found: NDArray[np.generic], expected: NDArray[np.generic], what: str = "") -> None:
    """Equal bit for bit, but any NaN equals any NaN."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, what

    def plain(values: NDArray[np.generic]) -> NDArray[np.generic]:
        if values.dtype == np.uint16:
            return np.where((values & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), values)
        bits = values.view(np.dtype(f"u{values.dtype.itemsize}"))
        return np.where(np.isnan(values), 0x7E00, bits)

    found, expected = np.array(found), np.array(expected)
    bits = np.dtype(f"u{found.dtype.itemsize}")
    differ = found.view(bits) != expected.view(bits)
    if differ.any():  # as the bits of two NaNs may
        np.testing.assert_array_equal(plain(found[differ]), plain(expected[differ]), what)


class Fenced:
    """A copy of an array between two pages that no one may touch, against the one or the other."""

    def __init__(self, array: NDArray[np.generic], at_end: bool = True) -> None:
        page = mmap.PAGESIZE
        pages = max(1, -(-array.nbytes // page))
        self.map = mmap.mmap(-1, (pages + 2) * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        for fence in (address, address + (pages + 1) * page):
            assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
        begin = page + (pages * page - array.nbytes if at_end else 0)
        room = np.frombuffer(self.map, np.uint8, array.nbytes, begin)
        self.array = room.view(array.dtype).reshape(array.shape)
        self.array[...] = array


def unaligned(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """A copy that begins at an odd address."""
    room = np.empty(array.nbytes + 64, np.uint8)
    begin = (1 - room.ctypes.data) % 64
    copy = np.frombuffer(room.data, array.dtype, array.size, begin).reshape(array.shape)
    copy[...] = array
    return copy
