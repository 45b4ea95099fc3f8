"""Checksums and sums of squares, and rows of GGUF types converted in one pass, on every set."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native, native_gguf
from qtool.gguf_types import BF16, BY_NAME, F16, F32, BlockType
from qtool.native.sums import checksum, squares
from support.kernels import gguf_data

# Of the first 0, 1, 64 and 1001 bytes in test_checksum_is_the_same_everywhere: files carry such.
KNOWN = ["c79baa963d2beca0", "a24201a412176aa0", "a54facf069fd1b32", "4080ec3d0cbeb533"]


@pytest.fixture(autouse=True, params=native.available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    before = native.selected()
    native.select(request.param)
    yield request.param
    native.select(before)


def test_checksum_is_the_same_everywhere() -> None:
    data = (np.arange(1001) * 7).astype(np.uint8)
    assert [f"{checksum(data[:n]):016x}" for n in (0, 1, 64, 1001)] == KNOWN


def test_checksum_sees_every_byte() -> None:
    data = np.arange(1000, dtype=np.uint8)
    known = checksum(data)
    assert known == checksum(data.copy()) != checksum(data, seed=1)
    seen = {known} | {checksum(data[:length]) for length in range(1000)}
    for position in range(1000):
        data[position] ^= 1
        seen.add(checksum(data))
        data[position] ^= 1
    assert len(seen) == 2001
    assert checksum(np.zeros(64, np.uint8)) != checksum(np.zeros(128, np.uint8))


def test_squares() -> None:
    draw = np.random.default_rng(0)
    for count in (0, 1, 15, 16, 17, 1000):
        x, y = draw.standard_normal((2, count), np.float32)
        assert math.isclose(squares(x), float((x.astype(float) ** 2).sum()), rel_tol=1e-12)
        apart = x.astype(float) - y
        assert math.isclose(squares(x, y), float((apart**2).sum()), rel_tol=1e-12)
        for value in (math.nan, math.inf):
            for position in {0, count // 2, count - 1} if count else ():
                wrong = x.copy()
                wrong[position] = value
                assert not math.isfinite(squares(wrong))
    assert math.isfinite(squares(np.full(1000, 3e38, np.float32)))


def stored(values: NDArray[np.float32], type_: BlockType) -> NDArray[np.uint8]:
    if type_ == F32:
        return values.view(np.uint8)
    if type_ == F16:
        return native.to_float16(values).view(np.uint8)
    if type_ == BF16:
        return native.to_bfloat16(values).view(np.uint8)
    return native_gguf.encode(values, type_)


def floats(raw: NDArray[np.uint8], type_: BlockType, in_features: int) -> NDArray[np.float32]:
    if type_ == F32:
        return raw.view(np.float32)
    if type_ == F16:
        return native.from_float16(raw.view(np.float16))
    if type_ == BF16:
        return native.from_bfloat16(raw.view(np.uint16))
    return native_gguf.dequantize(raw, type_, in_features)


@pytest.mark.parametrize("want", [F32, F16, BF16, *(BY_NAME[n] for n in ("Q4_K", "Q8_0", "Q3_K"))])
@pytest.mark.parametrize("have", [F32, F16, BF16, BY_NAME["Q5_K"], BY_NAME["MXFP4"]])
def test_convert_is_the_steps_one_after_another(have: BlockType, want: BlockType) -> None:
    raw = stored(gguf_data.weights("bell", 11, 512), have)
    values = floats(raw, have, 512)
    factors = gguf_data.importance("spread", 512)
    if want.name in BY_NAME:
        expected = native_gguf.encode(values, want, factors)
    else:
        expected = stored(values, want)
    size = squares(values)
    lost = squares(values, floats(expected, want, 512))
    for rows in (1, 4, 100):
        out = np.full((11, want.row_bytes(512)), 77, np.uint8)
        scratch = np.empty(2 * rows * 512, np.float32)
        found = native_gguf.convert(raw, have, want, 512, factors, out, scratch)
        assert (out == expected).all()
        assert math.isclose(found[0], size, rel_tol=1e-12)
        assert math.isclose(found[1], lost, rel_tol=1e-12, abs_tol=0.0)
        sums = native_gguf.convert(raw, have, None, 512, None, None, scratch)
        assert sums == (found[0], 0.0)


def test_convert_stops_at_what_is_not_finite() -> None:
    values = gguf_data.weights("bell", 8, 256)
    values[5, 3] = np.nan
    out = np.zeros((8, 144), np.uint8)
    scratch = np.empty(2 * 2 * 256, np.float32)
    size, _ = native_gguf.convert(values.view(np.uint8), F32, BY_NAME["Q4_K"], 256, None, out,
                                  scratch)  # fmt: skip
    assert not math.isfinite(size) and out[:4].any() and not out[4:].any()
    large = np.full((1, 256), 1e30, np.float32)
    size, lost = native_gguf.convert(large.view(np.uint8), F32, F16, 256, None,
                                     np.zeros((1, 512), np.uint8), scratch)  # fmt: skip
    assert math.isfinite(size) and not math.isfinite(lost)


def test_convert_checks_what_it_is_given() -> None:
    raw = np.zeros((2, 1024), np.uint8)
    out, scratch = np.zeros((2, 144), np.uint8), np.empty(512, np.float32)
    native_gguf.convert(raw, F32, BY_NAME["Q4_K"], 256, None, out, scratch)
    for wrong in (
        (raw[:1], F32, BY_NAME["Q4_K"], 256, None, out, scratch),
        (raw, F16, BY_NAME["Q4_K"], 256, None, out, scratch),
        (raw, F32, BY_NAME["IQ2_XS"], 256, None, np.zeros((2, 74), np.uint8), scratch),
        (raw, F32, BY_NAME["Q4_K"], 256, np.ones(255, np.float32), out, scratch),
        (raw, F32, BY_NAME["Q4_K"], 256, None, out, scratch[:511]),
    ):
        with pytest.raises(ValueError):
            native_gguf.convert(*wrong)
