"""The bitstream, against its definition in integers and against words worked out by hand."""

import numpy as np
import pytest

from qtool.errors import FormatError
from qtool.formats import bits


def stream_words(codes: list[int], width: int) -> list[int]:
    """The definition: one long number, cut into words."""
    stream = sum(code << (width * i) for i, code in enumerate(codes))
    return [(stream >> (32 * j)) & 0xFFFFFFFF for j in range(-(-len(codes) * width // 32))]


@pytest.mark.parametrize("width", range(1, 9))
def test_packing_is_the_definition(width: int) -> None:
    rng = np.random.default_rng(width)
    for count in (1, 2, 7, 8, 9, 10, 15, 31, 32, 33, 64, 95, 96, 100, 257):
        codes = rng.integers(0, 1 << width, (2, 3, count), dtype=np.uint8)
        words = bits.pack(codes, width)
        assert words.dtype == np.int32
        assert words.shape == (2, 3, bits.word_count(count, width))
        for index in np.ndindex(2, 3):
            assert words[index].view(np.uint32).tolist() == stream_words(
                codes[index].tolist(), width
            )
        assert np.array_equal(bits.unpack(words, width, count), codes)


def test_three_bit_codes_straddle_words() -> None:
    codes = np.zeros(32, np.uint8)
    codes[10] = 0b101  # bits 30, 31 and 32
    codes[21] = 0b110  # bits 63, 64 and 65
    words = bits.pack(codes, 3).view(np.uint32).tolist()
    assert words == [0b01 << 30, 1, 0b11]
    assert bits.unpack(np.array(words, np.uint32), 3, 32).tolist() == codes.tolist()


def test_nibbles_by_hand() -> None:
    words = bits.pack(np.arange(8, dtype=np.uint8)[None], 4)
    assert words.view(np.uint32).tolist() == [[0x76543210]]
    assert bits.pack(np.full(16, 2, np.uint8), 2).view(np.uint32).tolist() == [0xAAAAAAAA]
    assert bits.pack(np.full(4, 128, np.uint8), 8).view(np.uint32).tolist() == [0x80808080]


def test_any_bits_are_codes() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 12), dtype=np.int32)
    for width in (2, 3, 4, 6, 8):
        codes = bits.unpack(words, width, 12 * 32 // width)
        assert np.array_equal(bits.pack(codes, width), words)


@pytest.mark.parametrize("width", [2, 3, 4, 7])
def test_a_code_too_large_is_refused(width: int) -> None:
    codes = np.zeros((2, 8), np.uint8)
    codes[1, 3] = 1 << width
    with pytest.raises(FormatError, match=f"{1 << width} does not fit {width} bits"):
        bits.pack(codes, width)


def test_a_wrong_number_of_words_is_refused() -> None:
    with pytest.raises(FormatError, match="2 words for 32 codes of 3 bits; expected 3"):
        bits.unpack(np.zeros((4, 2), np.int32), 3, 32)


def test_packing_leaves_its_input_alone() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(8, 8) % 16
    kept = codes.copy()
    bits.pack(codes, 4)
    bits.pack_rows(codes, tuple(range(8)))
    assert np.array_equal(codes, kept)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1024, 1025), (2049, 7)])
def test_transpose(shape: tuple[int, int]) -> None:
    matrix = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
    transposed = bits.transpose(matrix)
    assert transposed.flags.c_contiguous and np.array_equal(transposed, matrix.T)


def test_reorder_and_its_inverse() -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes = np.arange(16, dtype=np.uint8)[None]
    assert bits.reorder(codes, order)[0, 8:].tolist() == [8, 10, 12, 14, 9, 11, 13, 15]
    assert bits.inverse(order) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert np.array_equal(bits.reorder(bits.reorder(codes, order), bits.inverse(order)), codes)


def test_rows_packed_together_are_the_words_of_the_transpose() -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes = np.random.default_rng(0).integers(0, 16, (24, 5), dtype=np.uint8)
    words = bits.pack_rows(codes, order)
    assert np.array_equal(words.T, bits.pack(bits.reorder(bits.transpose(codes), order), 4))
    assert np.array_equal(bits.unpack_rows(words, order), codes)
    codes[3, 3] = 16
    with pytest.raises(FormatError, match="16 does not fit 4 bits"):
        bits.pack_rows(codes, order)
