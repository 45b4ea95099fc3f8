"""Packing, unpacking and dequantizing in C against integer arithmetic on Python integers."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native
from support.kernels import packed_definitions as define

Codes = NDArray[np.uint8]


@pytest.fixture(params=native.available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has; the one before afterwards."""
    before, name = native.selected(), str(request.param)
    native.select(name)
    yield name
    native.select(before)


def random_codes(rows: int, columns: int, bits: int) -> Codes:
    rng = np.random.default_rng(rows * columns + bits)
    return rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)


def words_by_definition(codes: Codes, bits: int, layout: str) -> NDArray[np.int32]:
    """One long integer for each run of codes, cut into words."""
    if layout == "across":
        run_codes = codes.T.reshape(-1, 8)[:, list(native.AWQ_ORDER)]
        shape = (codes.shape[1], codes.shape[0] // 8)
    else:
        run_codes = codes
        shape = (codes.shape[0], -(-codes.shape[1] * bits // 32))
    words = []
    for run in run_codes.tolist():
        stream = sum(code << (bits * i) for i, code in enumerate(run))
        count = -(-len(run) * bits // 32)
        words.append([(stream >> (32 * j)) & 0xFFFFFFFF for j in range(count)])
    packed = np.array(words, np.uint32).view(np.int32).reshape(shape)
    return np.ascontiguousarray(packed.T) if layout == "columns" else packed


SHAPES = [(1, 1), (7, 9), (5, 64), (130, 200), (33, 65), (3, 31)]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("shape", SHAPES)
def test_streams_equal_the_definition(
    isa: str, bits: int, layout: str, shape: tuple[int, int]
) -> None:
    codes = random_codes(*shape, bits)
    words = native.pack(codes, bits, layout)
    np.testing.assert_array_equal(words, words_by_definition(codes, bits, layout))
    np.testing.assert_array_equal(native.unpack(words, shape, bits, layout), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_what_is_left_of_the_last_word_is_zero(isa: str, bits: int) -> None:
    """Whatever the memory held that they are packed in."""
    for columns in (*range(8, 49, 8), 80, 81, 120):
        codes = random_codes(3, columns, bits)
        for layout in ("rows", "columns"):
            native.pack(np.full((64, 2048), 255, np.uint8), 8, layout, threads=1)
            words = native.pack(codes, bits, layout, threads=1)
            np.testing.assert_array_equal(words, words_by_definition(codes, bits, layout))


@pytest.mark.parametrize("shape", [(8, 1), (136, 70), (264, 129)])
def test_words_across_rows_equal_the_definition(isa: str, shape: tuple[int, int]) -> None:
    codes = random_codes(*shape, 4)
    words = native.pack(codes, 4, "across")
    np.testing.assert_array_equal(words, words_by_definition(codes, 4, "across"))
    np.testing.assert_array_equal(native.unpack(words, shape, 4, "across"), codes)


def test_the_three_bit_stream_by_hand() -> None:
    """Code 10 has its lowest two bits on top of word 0 and its third at the bottom of word 1."""
    codes = np.zeros((1, 32), np.uint8)
    codes[0, 0], codes[0, 10], codes[0, 31] = 1, 7, 4
    words = native.pack(codes, 3, "rows").view(np.uint32)
    assert words.tolist() == [[0xC0000001, 0x00000001, 0x80000000]]


def test_awq_word_by_hand() -> None:
    """Rows 0 .. 7 hold 0 .. 7; nibbles are read from the lowest."""
    codes = np.arange(8, dtype=np.uint8)[:, None].copy()
    assert native.pack(codes, 4, "across").view(np.uint32).tolist() == [[0x75316420]]


@pytest.mark.parametrize("layout", ["rows", "columns", "across"])
def test_unpack_reads_any_word(isa: str, layout: str) -> None:
    """Random words, also where their last bits belong to no code."""
    rng = np.random.default_rng(1)
    shape, bits = (40, 75), 4 if layout == "across" else 3
    size = {"rows": (40, 8), "columns": (8, 40), "across": (75, 5)}[layout]
    words = rng.integers(-(2**31), 2**31, size, dtype=np.int64).astype(np.int32)
    codes = native.unpack(words, shape, bits, layout)
    mask = words_by_definition(np.full(shape, (1 << bits) - 1, np.uint8), bits, layout)
    np.testing.assert_array_equal(words_by_definition(codes, bits, layout), words & mask)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("layout", ["rows", "columns", "across"])
def test_threads_write_the_same_words(threads: int, layout: str) -> None:
    codes = random_codes(328, 150, 4)
    words = native.pack(codes, 4, layout, threads=threads)
    np.testing.assert_array_equal(words, words_by_definition(codes, 4, layout))
    np.testing.assert_array_equal(
        native.unpack(words, (328, 150), 4, layout, threads=threads), codes
    )


@pytest.mark.parametrize("layout", ["padded", "strips"])
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_pack_the_same_words(layout: str, threads: int) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (200, 192), dtype=np.uint8)
    words = native.pack(codes, 4, layout, threads=threads)
    np.testing.assert_array_equal(define.codes(words, codes.shape, 4, layout), codes)
    np.testing.assert_array_equal(
        native.unpack(words, codes.shape, 4, layout, threads=threads), codes
    )


@pytest.mark.parametrize(
    ("bits", "layout"),
    [(2, "rows"), (3, "rows"), (8, "rows"), (3, "columns"), (4, "columns"), (4, "across")],
)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantize_equals_the_definition(
    isa: str, bits: int, layout: str, ordered: bool, dtype: str
) -> None:
    rows, columns, size = 72, 150, 20
    rng = np.random.default_rng(bits)
    codes = random_codes(rows, columns, bits)
    # Every kind of finite float16 there is: zero, subnormal, largest.
    scale = rng.integers(0, 0x7C00, (rows, 8), dtype=np.uint16).view(np.float16)
    scale[0] = [0, 6e-8, 65504, 1, 0.1, 1e-5, 3, 0.25]
    zero = rng.integers(0, 1 << bits, (rows, 8), dtype=np.uint8)
    index = np.arange(columns, dtype=np.int32) // size
    if ordered:
        index = rng.permutation(index).astype(np.int32)
    found = native.dequantize(
        native.pack(codes, bits, layout),
        (rows, columns),
        bits,
        layout,
        scale=scale,
        zero=zero,
        group_size=size,
        g_idx=index if ordered else None,
        dtype=dtype,
        threads=2,
    )
    wide = (codes.astype(np.float32) - zero[:, index]) * scale.astype(np.float32)[:, index]
    if dtype == "float16":
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(found, wide.astype(np.float16))
    elif dtype == "bfloat16":
        np.testing.assert_array_equal(found, bfloat16_by_definition(wide))
    else:
        np.testing.assert_array_equal(found.view(np.uint32), wide.view(np.uint32))


def bfloat16_by_definition(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of the bits, plus one where the lower half is over the middle, or at it and
    the upper is odd."""
    bits = values.view(np.uint32).astype(np.uint64)
    upper, lower = bits >> 16, bits & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    return (upper + up).astype(np.uint16)


def test_codes_that_do_not_fit_are_refused(isa: str) -> None:
    codes = np.zeros((40, 70), np.uint8)
    codes[37, 69] = 8
    with pytest.raises(ValueError, match="a code does not fit 3 bits"):
        native.pack(codes, 3, "rows", threads=1)
    assert native.pack(codes, 4, "rows").shape == (40, 9)


def test_bad_arguments_are_refused() -> None:
    codes = np.zeros((16, 8), np.uint8)
    words = native.pack(codes, 4, "columns")
    scale, zero = np.ones((16, 2), np.float16), np.zeros((16, 2), np.uint8)
    with pytest.raises(ValueError, match="layout is 'diagonal'"):
        native.pack(codes, 4, "diagonal")
    with pytest.raises(ValueError, match="bits is 1"):
        native.pack(codes, 1, "rows")
    with pytest.raises(ValueError, match="a multiple of 8 rows"):
        native.pack(codes[:15], 4, "across")
    with pytest.raises(ValueError, match="order is"):
        native.pack(codes, 4, "across", order=(0, 1, 2, 3, 4, 5, 6, 6))
    with pytest.raises(ValueError, match=r"words has shape \(1, 16\), expected \(16, 1\)"):
        native.unpack(words, (16, 8), 4, "rows")
    with pytest.raises(TypeError, match="words is int64, expected int32"):
        native.unpack(words.astype(np.int64), (16, 8), 4, "columns")

    def dequantize(**more: object) -> None:
        options: dict[str, object] = {"scale": scale, "zero": zero, "group_size": 4, **more}
        native.dequantize(words, (16, 8), 4, "columns", **options)  # type: ignore[arg-type]

    dequantize()
    with pytest.raises(ValueError, match="g_idx has 0 to 2, expected 0 to 1"):
        dequantize(g_idx=np.array([0, 0, 0, 0, 1, 1, 1, 2], np.int32))
    with pytest.raises(ValueError, match="g_idx has -1 to 0"):
        dequantize(g_idx=np.array([0, 0, 0, 0, 0, 0, 0, -1], np.int32))
    with pytest.raises(ValueError, match="scale has 2 groups, expected 4"):
        dequantize(group_size=2)
    with pytest.raises(ValueError, match="zero has shape"):
        dequantize(zero=np.zeros((16, 3), np.uint8))
    with pytest.raises(ValueError, match="dtype is 'float64'"):
        dequantize(dtype="float64")


def test_every_float16_comes_back(isa: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = native.from_float16(bits.view(np.float16))
    expected = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(wide, expected)  # any NaN equals any NaN
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(wide.view(np.uint32)[number], expected.view(np.uint32)[number])
    back = native.to_float16(wide)
    np.testing.assert_array_equal(back.view(np.uint16)[number], bits[number])
    assert np.isnan(back[~number]).all()


def test_every_bfloat16_comes_back(isa: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = native.from_bfloat16(bits)
    np.testing.assert_array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)
    number = ~np.isnan(wide)
    back = native.to_bfloat16(wide)
    np.testing.assert_array_equal(back[number], bits[number])
    assert np.isnan(native.from_bfloat16(back[~number])).all()


def hard_floats() -> NDArray[np.float32]:
    """Random bit patterns, and every float16 and bfloat16 boundary with its neighbours."""
    rng = np.random.default_rng(0)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    wide = (np.arange(0x7F80, dtype=np.uint32) << 16) + np.uint32(0x8000)
    around = np.concatenate([middles.view(np.uint32), halves.view(np.uint32), wide])
    patterns = np.concatenate(
        [
            rng.integers(0, 2**32, 200_003, dtype=np.uint64).astype(np.uint32),
            around,
            around + np.uint32(1),
            around - np.uint32(1),
            around | np.uint32(0x80000000),
            np.array([0x477FEFFF, 0x477FF000, 0x47800000, 0x7F7FFFFF, 0x7F800000], np.uint32),
        ]
    )
    return patterns.view(np.float32)


@pytest.mark.parametrize("threads", [1, 3])
def test_rounding_to_half_precision(isa: str, threads: int) -> None:
    values = hard_floats()
    number = ~np.isnan(values)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    found = native.to_float16(values, threads)
    np.testing.assert_array_equal(found[number].view(np.uint16), expected[number].view(np.uint16))
    assert np.isnan(found[~number]).all()
    brain = native.to_bfloat16(values, threads)
    np.testing.assert_array_equal(brain[number], bfloat16_by_definition(values[number]))
    assert np.isnan(native.from_bfloat16(brain[~number])).all()


def test_nan_has_the_same_bits_on_every_instruction_set() -> None:
    values = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF], np.uint32).view(np.float32)
    before = native.selected()
    found = set()
    for name in native.available():
        native.select(name)
        halves = native.to_float16(values).view(np.uint16)
        found.add((tuple(halves.tolist()), tuple(native.to_bfloat16(values).tolist())))
    native.select(before)
    assert found == {((0x7E00, 0xFE09, 0x7FFF), (0x7FC0, 0xFFC1, 0x7FFF))}
