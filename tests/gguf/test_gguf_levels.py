"""The levels of GGUF blocks: codes and levels give what the kernels read, bit for bit."""

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.errors import FormatError, UnsupportedError
from qtool.gguf.gptq import lattice
from qtool.gguf.gptq.levels import SWEPT, Levels, codes_of, levels, put_codes
from qtool.gguf_types import BY_NAME, BlockType
from support.kernels import gguf_data

Bytes = NDArray[np.uint8]
TYPES = [BY_NAME[name] for name in sorted(SWEPT)]
each_type = pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)


def values(found: Levels, codes: Bytes) -> NDArray[np.float32]:
    """What codes [out, in] stand for."""
    product = found.scale.repeat(found.width, axis=1) * found.book[codes]
    return product if found.offset is None else product - found.offset.repeat(found.width, axis=1)


def any_codes(found: Levels, rows: int, in_features: int, seed: int) -> Bytes:
    """Codes that may stand together, drawn at random."""
    draw = np.random.default_rng(seed)
    if found.points is None:
        return draw.integers(0, found.book.size, (rows, in_features), np.uint8)
    points, half = found.points.codes, found.book.size // 2
    shape = (rows, in_features // points.shape[1])
    codes = points[draw.integers(0, len(points), shape)].reshape(rows, -1, 8)
    second = draw.random(codes.shape) < 0.5
    if found.points.second == "even":
        second[..., 5] ^= second.sum(axis=2) % 2 == 1
    elif found.points.second == "all":
        second[...] = second[..., :1]
    elif found.points.second == "none":
        second[...] = False
    chosen: Bytes = (codes + second * np.uint8(half)).reshape(rows, in_features)
    return chosen


def bits(array: NDArray[np.float32], block: BlockType) -> NDArray[np.uint32]:
    """But for the sign of zeros in IQ1_S, where a scale of zero has levels 0 t - 0."""
    return (array + np.float32(0) if block.name == "IQ1_S" else array).view(np.uint32)


def random_blocks(block: BlockType, rows: int, in_features: int, seed: int) -> Bytes:
    """Random bytes, scales and all, of which only those that stand for finite weights are taken."""
    count = rows * in_features // block.weights
    drawn = np.random.default_rng(seed).integers(0, 256, (2 * count + 50, block.nbytes), np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(native_gguf.dequantize(drawn, block, block.weights)).all(axis=1)
    found: Bytes = drawn[finite][:count].reshape(rows, -1)
    return found


def encoded(block: BlockType, rows: int, in_features: int) -> Bytes:
    weight = gguf_data.weights("heavy", rows, in_features, seed=2)
    weight[rows // 2] = 0
    return native_gguf.encode(weight, block, gguf_data.importance("spread", in_features))


@each_type
@pytest.mark.parametrize("rows", [1, 5, 2100])
@pytest.mark.parametrize("random", [True, False])
def test_levels_and_codes_are_what_the_kernels_read(
    block: BlockType, rows: int, random: bool
) -> None:
    columns = 512 if rows < 1000 else 256
    blocks = (
        random_blocks(block, rows, columns, seed=1) if random else encoded(block, rows, columns)
    )
    before = blocks.copy()
    old = codes_of(blocks, block, columns)
    put_codes(blocks, block, old)
    np.testing.assert_array_equal(blocks, before)

    found = levels(blocks, block, columns)
    if not random:  # what no encoder writes is not in the book
        assert old.max() < found.book.size
        read = native_gguf.dequantize(blocks, block, columns)
        np.testing.assert_array_equal(bits(values(found, old), block), bits(read, block))

    codes = any_codes(found, rows, columns, seed=2)
    put_codes(blocks, block, codes)
    np.testing.assert_array_equal(codes_of(blocks, block, columns), codes)
    read = native_gguf.dequantize(blocks, block, columns)
    np.testing.assert_array_equal(bits(values(found, codes), block), bits(read, block))
    after = levels(blocks, block, columns)  # nothing but codes has changed
    np.testing.assert_array_equal(after.scale, found.scale)
    if found.offset is not None:
        np.testing.assert_array_equal(after.offset, found.offset)
    put_codes(blocks, block, old)
    np.testing.assert_array_equal(blocks, before)


def test_single_weights_of_all_other_types_have_no_levels() -> None:
    """Ternary types, whose codes share bytes or have two or three levels alone."""
    others = set(BY_NAME) - SWEPT
    assert not any(name.startswith("IQ") for name in others)
    for name in others:
        block = BY_NAME[name]
        with pytest.raises(UnsupportedError, match=f"{name} has no levels .* Q4_0, Q4_1"):
            levels(np.zeros((1, block.row_bytes(256)), np.uint8), block, 256)


@pytest.mark.parametrize("name", sorted(lattice.NAMES))
def test_codes_beside_the_lattice_are_refused(name: str) -> None:
    block = BY_NAME[name]
    blocks = encoded(block, 3, 256)
    found, before = levels(blocks, block, 256), blocks.copy()
    assert found.points is not None
    second = found.points.second
    half = found.book.size // (1 if second == "none" else 2)
    there = {tuple(point) for point in found.points.codes.tolist()}
    width = found.points.codes.shape[1]
    good = any_codes(found, 3, 256, seed=4)
    draw = np.random.default_rng(5)
    while (beside := tuple(draw.integers(0, half, width).tolist())) in there:
        pass
    codes = good.copy()
    codes[1, 8 : 8 + width] = beside
    with pytest.raises(ValueError, match=f"no point of {name}"):
        put_codes(blocks, block, codes)
    codes = good.copy()
    codes[2, 7] = found.book.size
    with pytest.raises(ValueError, match=f"no point of {name}"):
        put_codes(blocks, block, codes)
    codes = good.copy()
    codes[1, 17] = (codes[1, 17] + half) % (2 * half)
    wrong = {"even": "odd number of signs", "all": "two shifts", "none": "no point of"}
    if second in wrong:
        with pytest.raises(ValueError, match=wrong[second]):
            put_codes(blocks, block, codes)
    np.testing.assert_array_equal(blocks, before)


def test_refusals() -> None:
    block = BY_NAME["Q4_K"]
    blocks, codes = np.zeros((2, 288), np.uint8), np.zeros((2, 512), np.uint8)
    put_codes(blocks, block, codes)
    with pytest.raises(FormatError, match="blocks of 256 weights"):
        levels(blocks, block, 500)
    with pytest.raises(ValueError, match=r"blocks has shape \(2, 288\)"):
        put_codes(blocks, block, codes[:1])
    with pytest.raises(ValueError, match="not contiguous"):
        put_codes(np.zeros((2, 576), np.uint8)[:, ::2], block, codes)
    with pytest.raises(TypeError, match="codes is int64"):
        put_codes(blocks, block, codes.astype(np.int64))
