"""CUDA kernels that dequantize, on the host: what the CPU kernels make, bit for bit.

The whole test set of the CPU kernels (test_native_*.py) goes through an emulated grid, which
checks every access to memory and that each result is written once.
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.cuda import float_tasks, tasks
from qtool.formats import awq, gptq
from qtool.formats.facts import Options
from qtool.gguf_types import BY_NAME, BlockType
from qtool.native.floats8 import dequantize_bytes, dequantize_fp4
from qtool.scheme import GroupQuant
from support.cuda.cuda_emulation import Emulator, emulator, placed, room
from support.kernels import packed_definitions as define
from support.kernels import packed_words
from support.kernels.random_matrices import random_blocks, random_quant, words_of

__all__ = ["emulator"]

DTYPES = define.DTYPES


def optional(array: NDArray[Any] | None) -> NDArray[Any] | None:
    return None if array is None else placed(array)


def test_python_and_the_kernels_agree_on_the_fields(emulator: Emulator) -> None:
    assert emulator.fields() == tasks.FIELDS


@pytest.mark.parametrize(("layout", "bits"), packed_words.WORDS)
def test_words(emulator: Emulator, layout: str, bits: int) -> None:
    more = [(8, 512, 16), (8, 1088, 10), (65, 72, 24), (64, 64, 8)]
    for shape in packed_words.SHAPES + packed_words.ODD_SHAPES + more:
        if not packed_words.fits(layout, shape):
            continue
        for ordered in (False, True):
            packed = packed_words.Packed(layout, bits, shape, ordered)
            given: dict[str, Any] = {
                "scale": placed(packed.scale),
                "zero": placed(packed.zero),
                "g_idx": optional(packed.g_idx),
                "group_size": shape[2],
            }
            words = placed(packed.words)
            for dtype, kind in DTYPES.items():
                out = room(packed.shape, kind)
                task = tasks.words(words, packed.shape, bits, layout, out=out, **given)
                found = emulator.run(task, out, order=ordered)
                define.same(found, packed.found(dtype, threads=1), f"{dtype} {shape}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_in_half_precision(emulator: Emulator, dtype: str) -> None:
    packed = packed_words.Packed("rows", 4, (8, 64, 32))
    scale = packed.scale.astype(np.float16)
    if dtype == "bfloat16":
        scale = define.bfloat16_of(packed.scale)
    out = room(packed.shape, np.float32)
    given: dict[str, Any] = {"scale": placed(scale), "zero": placed(packed.zero), "group_size": 32}
    words = placed(packed.words)
    task = tasks.words(words, packed.shape, 4, "rows", out=out, **given)
    define.same(emulator.run(task, out), packed.found("float32", scale=scale))


def same_in_all(
    emulator: Emulator, make: Any, quant: GroupQuant, tensors: list[Any], **options: Any
) -> None:
    """A task of a matrix's stored tensors, in every dtype, against the definition."""
    exact = np.ascontiguousarray(quant.dequantize())
    here = [placed(t) if isinstance(t, np.ndarray) else t for t in tensors]
    placed_options = {
        name: placed(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    for dtype, kind in DTYPES.items():
        out = room(quant.shape, kind)
        found = emulator.run(make(*here, out=out, **placed_options), out)
        define.same(found, define.stored(exact, dtype), dtype)


@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast", "llm_awq"])
def test_awq(emulator: Emulator, layout: str, size: int) -> None:
    for shape in [(32, 256), (200, 384)]:
        quant = random_quant(4, shape, size)
        packed = awq.pack("m", quant, Options(layout))
        zeros = packed.get("m.qzeros", packed.get("m.scaled_zeros"))
        make = {"gemm": tasks.awq_gemm, "gemv": tasks.awq_gemv}.get(layout, tasks.awq_gemv_fast)
        same_in_all(emulator, make, quant, [packed["m.qweight"], zeros, packed["m.scales"], size])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(emulator: Emulator, bits: int, version: int, ordered: bool) -> None:
    for shape in [(32, 192), (160, 320)]:
        quant = random_quant(bits, shape, 64, symmetric=version == 1, ordered=ordered)
        packed = gptq.pack("m", quant, Options(f"v{version}"))
        tensors = [packed["m.qweight"], packed["m.qzeros"], packed["m.scales"], bits, 64]
        g_idx = packed["m.g_idx"] if ordered else None
        options = {"version": version, "g_idx": g_idx}
        same_in_all(emulator, tasks.gptq, quant, tensors, **options)


def test_zeros_of_version_one_wrap_in_their_own_field(emulator: Emulator) -> None:
    words = placed(np.full((1, 1), 0x0F, np.int32))
    codes = placed(np.full((1, 8), 0x33333333, np.int32))
    out = room((8, 8), np.float32)
    scale = placed(np.ones((1, 8), np.float16))
    task = tasks.gptq(codes, words, scale, 4, -1, version=1, out=out)
    np.testing.assert_array_equal(emulator.run(task, out)[:, 0], [3, 2, 2, 2, 2, 2, 2, 2])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_quantized(emulator: Emulator, bits: int, symmetric: bool, padded: bool) -> None:
    shape = (24, 192)
    quant = random_quant(bits, shape, 32, symmetric=symmetric, ordered=bits == 5)
    zero_point = None
    if not symmetric:
        across = words_of(np.ascontiguousarray(quant.zero.T), bits, padded)
        zero_point = np.ascontiguousarray(across.T)
    tensors = [words_of(quant.codes, bits, padded), quant.scale, shape, bits, 32]
    options = {"zero_point": zero_point, "g_idx": quant.g_idx}
    same_in_all(emulator, tasks.pack_quantized, quant, tensors, **options)


@pytest.mark.parametrize("kind", packed_words.KINDS)
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 32), (128, 128), (3, 7)])
def test_bytes(emulator: Emulator, kind: str, block: tuple[int, int]) -> None:
    dtype_of = np.int8 if kind == "int8" else np.uint8
    for rows, columns in [(1, 1), (7, 33), (130, 300), (5, 256), (129, 264)]:
        codes = placed(define.random_bits(rows, (rows, columns), dtype_of))
        every = np.arange(256, dtype=np.uint8).view(dtype_of)
        codes.reshape(-1)[: min(256, codes.size)] = every[: codes.size]
        down, across = (n if b == -1 else b for n, b in zip(codes.shape, block, strict=True))
        scale = placed(packed_words.any_float(columns, (-(-rows // down), -(-columns // across))))
        zeros: list[NDArray[Any] | None] = [None]
        if "float8" not in kind:
            zeros.append(placed(define.random_bits(4, scale.shape, dtype_of)))
        for zero in zeros:
            given: dict[str, Any] = {"scale": scale, "block": block, "zero": zero}
            for dtype, stored_as in DTYPES.items():
                out = room(codes.shape, stored_as)
                found = emulator.run(float_tasks.bytes_(codes, kind, out=out, **given), out)
                want = dequantize_bytes(codes, kind, dtype=dtype, threads=1, **given)
                define.same(found, want, f"{dtype} {codes.shape}")


@pytest.mark.parametrize("kind", ["e8m0", "e4m3fn"])
@pytest.mark.parametrize("outer", [{}, {"divisor": 197.3}, {"factor": 0.0071}, {"divisor": 0.0}])
def test_four_bit_floats(emulator: Emulator, kind: str, outer: dict[str, float]) -> None:
    for rows, columns, group in [(1, 16, 16), (16, 2080, 32), (7, 96, 32), (17, 1040, 16)]:
        packed = placed(define.random_bits(rows, (rows, columns // 2), np.uint8))
        scale = placed(define.random_bits(columns, (rows, columns // group), np.uint8))
        scale.reshape(-1)[: min(256, scale.size)] = np.arange(256, dtype=np.uint8)[: scale.size]
        for dtype, stored_as in DTYPES.items():
            out = room((rows, columns), stored_as)
            found = emulator.run(float_tasks.fp4(packed, scale, kind, out=out, **outer), out)
            define.same(found, dequantize_fp4(packed, scale, kind, dtype=dtype, **outer), dtype)


@pytest.mark.parametrize("block", BY_NAME.values(), ids=lambda block: block.name)
def test_gguf(emulator: Emulator, block: BlockType) -> None:
    """Random blocks in rows of one, of several and of more columns than a block of threads has."""
    for rows, row_blocks in [
        (16384 // block.weights + 3, 1),
        (9, 3),
        (3, 1056 // block.weights + 1),
    ]:
        columns = row_blocks * block.weights
        blocks = placed(random_blocks(block, rows * row_blocks).reshape(rows, -1))
        for dtype, stored_as in DTYPES.items():
            out = room((rows, columns), stored_as)
            found = emulator.run(float_tasks.gguf(blocks, block, columns, out=out), out)
            define.same(found, native_gguf.dequantize(blocks, block, columns, dtype), dtype)


def test_every_kernel_is_compared(emulator: Emulator) -> None:
    """Each name of the table belongs to a case above."""
    words = {f"{layout}_{bits}" for layout, bits in packed_words.WORDS}
    words -= {f"padded_{bits}" for bits in (2, 4, 8)}
    compared = words | {block.lower() for block in BY_NAME}
    compared |= {*packed_words.KINDS, "fp4_e8m0", "fp4_e4m3fn"}
    made = {name for name in emulator.kernels() if name.startswith("dequantize_")}
    assert made == {
        f"dequantize_{name}_{out}" for name in compared for out in ("f32", "f16", "bf16")
    }


def test_the_emulator_notices(emulator: Emulator) -> None:
    """Arrays that are told shorter than they are, a grid too small or too large, a wrong pitch."""
    packed = packed_words.Packed("columns", 4, (72, 128, 32))
    given: dict[str, Any] = {"scale": placed(packed.scale), "zero": placed(packed.zero)}
    out = room(packed.shape, np.float16)
    words = placed(packed.words)
    task = tasks.words(words, packed.shape, 4, "columns", group_size=32, out=out, **given)
    assert emulator.fault(task, out.size) is None

    def broken(blocks: tuple[int, int] | None = None, **fields: int) -> str:
        wrong = tasks.Task(task.kernel, blocks or task.blocks, {**task.fields, **fields})
        fault = emulator.fault(wrong, out.size)
        assert fault is not None
        return fault

    assert "read outside of the array" in broken(codes_bytes=words.nbytes - 4)
    assert "read outside of the array" in broken(scale_bytes=packed.scale.nbytes - 4)
    assert "read outside of the array" in broken(zero_bytes=packed.zero.nbytes - 1)
    assert "write outside of the array" in broken(values_bytes=out.nbytes - 2)
    assert "not written" in broken(blocks=(1, 1))
    before = np.zeros(out.size, np.uint8)
    before[-1] = 1
    assert "written twice" in str(emulator.fault(task, out.size, written=before))
    assert emulator.fault(tasks.Task(task.kernel, (3, 3), task.fields), out.size) is None
    q4 = BY_NAME["Q4_K"]
    blocks = placed(random_blocks(q4, 2))
    out = room((2, 256), np.float32)
    task = float_tasks.gguf(blocks, q4, 256, out=out)
    assert "no multiple of its size" in broken(pitch=142)


def test_refusals() -> None:
    out, scale = room((4, 64), np.float32), placed(np.ones((4, 2), np.float32))
    words, zero = placed(np.zeros((4, 8), np.int32)), placed(np.zeros((4, 2), np.uint8))
    given: dict[str, Any] = {"scale": scale, "zero": zero, "group_size": 32, "out": out}
    tasks.words(words, (4, 64), 4, "rows", **given)
    with pytest.raises(ValueError, match=r"words has shape \(4, 8\), expected \(4, 6\)"):
        tasks.words(words, (4, 64), 3, "rows", **given)
    with pytest.raises(ValueError, match=r"scale has shape \(4, 2\), expected \(4, 4\)"):
        tasks.words(words, (4, 64), 4, "rows", **{**given, "group_size": 16})
    with pytest.raises(TypeError, match="zero is uint8, expected int8"):
        codes = placed(np.zeros((4, 64), np.int8))
        float_tasks.bytes_(codes, "int8", scale=scale, block=(1, 32), zero=zero, out=out)
    with pytest.raises(ValueError, match="out is not contiguous"):
        tasks.words(words, (4, 64), 4, "rows", **{**given, "out": out.T.copy().T})
    with pytest.raises(ValueError, match="scale begins at no multiple of 16 bytes"):
        odd = define.unaligned(scale)
        tasks.words(words, (4, 64), 4, "rows", **{**given, "scale": odd})
    with pytest.raises(ValueError, match="5 bits, expected 2, 3, 4 or 8 in the layout columns"):
        tasks.words(words, (4, 64), 5, "columns", **given)
    rows = 8 * 65535 + 1  # a grid has no more blocks down
    codes, high = room((rows, 1), np.uint8), room((rows, 1), np.float16)
    with pytest.raises(ValueError, match="expected 1 to 524280 rows and 268435455 columns"):
        one = room((rows, 1), np.float32)
        float_tasks.bytes_(codes, "uint8", scale=one, block=(1, -1), out=high)
