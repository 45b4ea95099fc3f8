"""Packed matrices of checkpoints to floats in C: what the readers of formats/ make of them."""

from typing import Any

import numpy as np
import pytest

from qtool import native
from qtool.formats import awq, gptq
from qtool.formats.facts import Options
from qtool.native import stored
from qtool.scheme import GroupQuant
from support.kernels import packed_definitions as define
from support.kernels.random_matrices import random_quant, words_of

DTYPES = ["float32", "float16", "bfloat16"]


def same_in_all(quant: GroupQuant, function: Any, tensors: list[Any], **options: Any) -> None:
    """The definition of the quant in every dtype, and a range of rows of it."""
    exact = np.ascontiguousarray(quant.dequantize())
    for dtype in DTYPES:
        want = define.stored(exact, dtype)
        define.same(function(*tensors, dtype=dtype, **options), want, dtype)
        found = function(*tensors, dtype=dtype, rows=(3, 21), threads=2, **options)
        define.same(found, want[3:21], dtype)


@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast", "llm_awq"])
def test_awq(layout: str, size: int) -> None:
    quant = random_quant(4, (32, 256), size)
    packed = awq.pack("m", quant, Options(layout))
    zeros = packed.get("m.qzeros", packed.get("m.scaled_zeros"))
    function = {"gemm": stored.awq_gemm, "gemv": stored.awq_gemv}.get(layout, stored.awq_gemv_fast)
    same_in_all(quant, function, [packed["m.qweight"], zeros, packed["m.scales"], size])


def test_scaled_zeros_that_are_none() -> None:
    quant = random_quant(4, (32, 256), 64)
    packed = awq.pack("m", quant, Options("gemv_fast"))
    wrong = packed["m.qzeros"] - np.float16(100)
    with pytest.raises(ValueError, match="no 4-bit zeros times the scales"):
        stored.awq_gemv_fast(packed["m.qweight"], wrong, packed["m.scales"], 64)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, version: int, ordered: bool) -> None:
    quant = random_quant(bits, (32, 192), 64, symmetric=version == 1, ordered=ordered)
    packed = gptq.pack("m", quant, Options(f"v{version}"))
    tensors = [packed["m.qweight"], packed["m.qzeros"], packed["m.scales"], bits, 64]
    g_idx = packed["m.g_idx"] if ordered else None
    same_in_all(quant, stored.gptq, tensors, version=version, g_idx=g_idx)


def test_zeros_of_version_one_wrap_in_their_own_field() -> None:
    """15 stored is a zero of 0; adding 1 to the word would carry into its neighbour."""
    words = np.full((1, 1), 0x0F, np.int32)
    codes = np.full((1, 8), 0x33333333, np.int32)
    scale = np.ones((1, 8), np.float16)
    found = stored.gptq(codes, words, scale, 4, -1, version=1)
    np.testing.assert_array_equal(found[:, 0], [3, 2, 2, 2, 2, 2, 2, 2])
    with pytest.raises(ValueError, match="version is 3"):
        stored.gptq(codes, words, scale, 4, -1, version=3)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_quantized(bits: int, symmetric: bool, padded: bool) -> None:
    quant = random_quant(bits, (24, 192), 32, symmetric=symmetric, ordered=bits == 5)
    packed = words_of(quant.codes, bits, padded)
    zero_point = None
    if not symmetric:
        across = words_of(np.ascontiguousarray(quant.zero.T), bits, padded)
        zero_point = np.ascontiguousarray(across.T)
    tensors = [packed, quant.scale, (24, 192), bits, 32]
    options = {"zero_point": zero_point, "g_idx": quant.g_idx}
    same_in_all(quant, stored.pack_quantized, tensors, **options)


def test_pack_quantized_of_another_width() -> None:
    packed = np.zeros((8, 9), np.int32)
    with pytest.raises(ValueError, match=r"weight_packed has shape \(8, 9\), expected \(8, 6\)"):
        stored.pack_quantized(packed, np.ones((8, 1), np.float16), (8, 64), 3, -1)


@pytest.mark.parametrize("layout", ["padded", "strips"])
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_pack_the_same_words(layout: str, threads: int) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (200, 192), dtype=np.uint8)
    words = native.pack(codes, 4, layout, threads=threads)
    np.testing.assert_array_equal(define.codes(words, codes.shape, 4, layout), codes)
    np.testing.assert_array_equal(
        native.unpack(words, codes.shape, 4, layout, threads=threads), codes
    )
