"""Blocks of GGUF to floats in C: the definition, bit for bit, on every instruction set."""

import ctypes
import mmap

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native, native_gguf
from qtool.errors import FormatError
from qtool.gguf_types import BY_NAME, BlockType
from support.kernels import gguf_definitions
from support.kernels.isas import isa_restored
from support.kernels.random_matrices import random_blocks

__all__ = ["isa_restored"]

TYPES = list(BY_NAME.values())
LANES = 16  # of the widest instruction set


def bits(array: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
    """The bits of floats, every NaN the same."""
    if array.dtype == np.uint16:  # bfloat16
        return np.where((array & 0x7FFF) > 0x7F80, 0x7FC0, array)
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    return np.where(np.isnan(array), 1, array.view(unsigned))


def in_dtype(exact: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """float32 rounded to nearest even."""
    if dtype == "float32":
        return exact
    if dtype == "float16":
        with np.errstate(all="ignore"):
            return exact.astype(np.float16)
    word = exact.view(np.uint32).astype(np.uint64)
    rounded = ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(exact), np.uint16(0x7FC0), rounded)


@pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)
def test_every_instruction_set_and_dtype_gives_the_definition(block: BlockType) -> None:
    count = 65536 // block.weights + 3
    blocks = random_blocks(block, count)
    if gguf_definitions.defined(block.name):
        exact = gguf_definitions.dequantize(blocks, block.name)
    else:
        exact = gguf_definitions.gguf_py(blocks, block.name)
    for isa in native.available():
        native.select(isa)
        for dtype in ("float32", "float16", "bfloat16"):
            got = native_gguf.dequantize(blocks, block, block.weights, dtype, threads=2)
            np.testing.assert_array_equal(bits(got), bits(in_dtype(exact, dtype)), f"{isa} {dtype}")


@pytest.mark.parametrize("name", sorted(name for name in BY_NAME if gguf_definitions.defined(name)))
def test_definition_agrees_with_the_package_gguf(name: str) -> None:
    if name not in gguf_definitions.READ_BY_GGUF_PY:
        assert name in {"Q1_0", "Q2_0"}
        return
    blocks = random_blocks(BY_NAME[name], 500, seed=1)
    ours, theirs = gguf_definitions.dequantize(blocks, name), gguf_definitions.gguf_py(blocks, name)
    np.testing.assert_array_equal(bits(ours), bits(theirs))


def test_sizes_are_those_of_the_package_gguf() -> None:
    for kind, (weights, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name in BY_NAME:
            block = BY_NAME[kind.name]
            assert (block.number, block.weights, block.nbytes) == (kind, weights, nbytes)


def test_a_block_written_by_hand() -> None:
    # d = 0.5, dmin = 0.25; scale 3 and minimum 2 of sub-block 0, the others zero; weight 0 has
    # code 5, weight 32 (sub-block 1, the high nibble) code 7, which its scale of zero hides.
    block = np.zeros((1, 144), np.uint8)
    block[0, :4] = np.array([0.5, 0.25], np.float16).view(np.uint8)
    block[0, 4], block[0, 8], block[0, 16] = 3, 2, 5 | 7 << 4
    got = native_gguf.dequantize(block, BY_NAME["Q4_K"], 256)[0]
    assert got[:34].tolist() == [7.0] + [-0.5] * 31 + [0.0, 0.0]


class Fenced:
    """Bytes that end where a page begins which no one may touch."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.pages = -(-size // page)
        self.map = mmap.mmap(-1, (self.pages + 1) * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        fence = ctypes.c_void_p(address + self.pages * page)
        assert libc.mprotect(fence, ctypes.c_size_t(page), 0) == 0
        whole = np.frombuffer(self.map, np.uint8, self.pages * page)
        self.bytes = whole[self.pages * page - size :]


@pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)
def test_neither_reads_nor_writes_past_the_end(block: BlockType) -> None:
    for count in (1, 2, 5):
        source = Fenced(count * block.nbytes)
        source.bytes[:] = random_blocks(block, count).reshape(-1)
        for dtype, size in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
            numpy_dtype = {"float32": np.float32, "float16": np.float16}.get(dtype, np.uint16)
            target = Fenced(count * block.weights * size)
            out = target.bytes.view(numpy_dtype).reshape(1, -1)
            plain = random_blocks(block, count).reshape(1, -1)
            for isa in native.available():
                native.select(isa)
                row = source.bytes.reshape(1, -1)
                native_gguf.dequantize(row, block, count * block.weights, dtype, out=out)
                want = native_gguf.dequantize(plain, block, count * block.weights, dtype)
                np.testing.assert_array_equal(bits(out), bits(want))


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "IQ3_XXS", "IQ1_M"])
def test_addresses_need_no_alignment(name: str) -> None:
    block = BY_NAME[name]
    blocks = random_blocks(block, 7)
    want = native_gguf.dequantize(blocks, block, block.weights)
    source = np.empty(blocks.size + 1, np.uint8)[1:].reshape(blocks.shape)
    source[:] = blocks
    room = np.empty(want.nbytes + 1, np.uint8)
    out = np.frombuffer(room.data, np.float32, want.size, 1).reshape(want.shape)
    for isa in native.available():
        native.select(isa)
        native_gguf.dequantize(source, block, block.weights, out=out)
        np.testing.assert_array_equal(bits(np.array(out)), bits(want))


def test_rows_split_over_threads_are_the_same_rows() -> None:
    block = BY_NAME["Q5_K"]
    blocks = random_blocks(block, 2 * 101).reshape(101, -1)
    one = native_gguf.dequantize(blocks, block, 512, threads=1)
    three = native_gguf.dequantize(blocks, block, 512, threads=3)
    np.testing.assert_array_equal(bits(one), bits(three))
    middle = native_gguf.dequantize(blocks[40:41], block, 512)
    np.testing.assert_array_equal(bits(middle), bits(one[40:41]))


def test_refusals() -> None:
    block = BY_NAME["Q4_K"]
    with pytest.raises(FormatError, match="blocks of 256 weights, and 128 is not a multiple"):
        native_gguf.dequantize(np.zeros((1, 72), np.uint8), block, 128)
    with pytest.raises(ValueError, match="blocks has shape"):
        native_gguf.dequantize(np.zeros((1, 143), np.uint8), block, 256)
    with pytest.raises(ValueError, match="dtype is 'float64'"):
        native_gguf.dequantize(np.zeros((1, 144), np.uint8), block, 256, "float64")
