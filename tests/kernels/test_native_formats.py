"""Every packed format to floats in C: its definition bit for bit, on every instruction set."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native
from qtool.native.floats8 import dequantize_bytes, dequantize_fp4
from qtool.native.packing import dequantize, words_shape
from support.kernels import packed_definitions as define
from support.kernels.isas import isa_restored, isas
from support.kernels.packed_words import (
    KINDS,
    ODD_SHAPES,
    SHAPES,
    WORDS,
    Packed,
    any_float,
    fits,
    zero_of,
)

__all__ = ["isa_restored"]

DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize(("layout", "bits"), WORDS)
def test_words_give_the_definition(layout: str, bits: int) -> None:
    for shape in SHAPES + ODD_SHAPES:
        if not fits(layout, shape):
            continue
        for ordered in (False, True):
            packed = Packed(layout, bits, shape, ordered)
            for dtype in DTYPES:
                want = define.stored(packed.exact, dtype)
                for isa in isas():
                    define.same(packed.found(dtype, threads=2), want, f"{isa} {dtype} {shape}")


@pytest.mark.parametrize(
    ("layout", "bits"), [("columns", 3), ("columns", 4), ("rows", 8), ("across", 4), ("strips", 4)]
)
def test_many_groups(layout: str, bits: int) -> None:
    """As many as are looked up in one, two and four pairs of registers, and more."""
    for shape in [(8, 512, 16), (8, 640, 16), (8, 1088, 10), (8, 2176, 16)]:
        for ordered in (False, True):
            packed = Packed(layout, bits, shape, ordered)
            for dtype in DTYPES:
                want = define.stored(packed.exact, dtype)
                for isa in isas():
                    define.same(packed.found(dtype), want, f"{isa} {dtype} {shape}")


LARGE = [("columns", 3), ("columns", 4), ("across", 4), ("rows", 4), ("rows", 5)]
LARGE += [("padded", bits) for bits in (3, 5, 6, 7)]
FEW = [("columns", 3), ("across", 4), ("rows", 4), ("padded", 3), ("padded", 7)]


@pytest.mark.parametrize(
    ("layout", "bits"),
    [pytest.param(*one, marks=[] if one in FEW else [pytest.mark.slow]) for one in LARGE],
)
def test_large_matrices_written_past_the_caches(layout: str, bits: int) -> None:
    """More than 4 MiB of each dtype, so that stores pass the caches where they can."""
    rows, columns = 1104, 2048
    codes = (define.random_bits(1, (rows, columns), np.uint8) & ((1 << bits) - 1)).astype(np.uint8)
    words = native.pack(codes, bits, layout)
    scale = any_float(2, (rows, columns // 64))
    zero = zero_of(3, scale.shape, bits)
    in_order = np.arange(columns, dtype=np.int32) // 64
    shuffled = np.random.default_rng(4).permutation(in_order)
    for g_idx in (None, shuffled):
        index = in_order if g_idx is None else g_idx
        with np.errstate(all="ignore"):
            exact = (codes.astype(np.float32) - zero[:, index]) * scale[:, index]
        options: dict[str, Any] = {"scale": scale, "zero": zero, "group_size": 64, "g_idx": g_idx}
        for dtype in DTYPES:
            want = define.stored(exact, dtype)
            for isa in isas():
                found = dequantize(
                    words, (rows, columns), bits, layout, dtype=dtype, threads=1, **options
                )
                define.same(found, want, f"{isa} {dtype}")


@pytest.mark.parametrize(("layout", "bits"), WORDS)
def test_words_touch_nothing_else(layout: str, bits: int) -> None:
    """Between pages that no one may touch, at either end; then at odd addresses."""
    for shape in [(8, 64, 32), (72, 1088, 64), (5, 37, 5), (17, 1030, -1)]:
        if not fits(layout, shape):
            continue
        packed = Packed(layout, bits, shape)
        for dtype in DTYPES:
            want = define.stored(packed.exact, dtype)
            for at_end in (False, True):
                words = define.Fenced(packed.words, at_end)
                scale = define.Fenced(packed.scale, at_end)
                zero = define.Fenced(packed.zero, at_end)
                out = define.Fenced(np.zeros_like(want), at_end)
                fenced = {"words": words.array, "scale": scale.array, "zero": zero.array}
                for isa in isas():
                    packed.found(dtype, out=out.array, threads=1, **fenced)
                    define.same(out.array, want, f"{isa} {dtype}")
            odd = define.unaligned(np.zeros_like(want))
            words_at_odd = define.unaligned(packed.words)
            for isa in isas():
                packed.found(dtype, out=odd, words=words_at_odd, threads=1)
                define.same(odd, want, f"{isa} {dtype}")


@pytest.mark.parametrize(("layout", "bits"), WORDS)
def test_pack_and_unpack_touch_nothing_else(layout: str, bits: int) -> None:
    for shape in [(8, 64, 0), (72, 1088, 0), (5, 37, 0), (17, 1030, 0)]:
        if not fits(layout, shape):
            continue
        size = shape[:2]
        words = define.random_bits(9, words_shape(size, bits, layout), np.int32)
        codes = define.codes(words, size, bits, layout)
        for at_end in (False, True):
            source = define.Fenced(words, at_end)
            room = define.Fenced(np.zeros(size, np.uint8), at_end)
            back = define.Fenced(np.full(words.shape, -1, np.int32), at_end)
            right: NDArray[Any] | None = None
            for isa in isas():
                native.unpack(source.array, size, bits, layout, threads=1, out=room.array)
                np.testing.assert_array_equal(room.array, codes, isa)
                back.array[...] = -1
                native.pack(room.array, bits, layout, threads=1, out=back.array)
                if right is None or not np.array_equal(back.array, right):
                    again = define.codes(back.array, size, bits, layout)
                    np.testing.assert_array_equal(again, codes, isa)
                    right = back.array.copy()


@pytest.mark.parametrize(
    ("layout", "bits"), [("rows", 3), ("columns", 4), ("across", 4), ("strips", 4)]
)
def test_ranges_of_rows(layout: str, bits: int) -> None:
    packed = Packed(layout, bits, (72, 192, 32))
    for rows in [(0, 72), (8, 40), (3, 4), (71, 72), (13, 66), (5, 5)]:
        for isa in isas():
            found = packed.found("float32", rows=rows, threads=2)
            define.same(found, packed.exact[rows[0] : rows[1]], f"{isa} {rows}")
    with pytest.raises(ValueError, match="rows are 3 to 73 of a matrix of 72"):
        packed.found("float32", rows=(3, 73))


def test_scales_in_half_precision() -> None:
    packed = Packed("rows", 4, (8, 64, 32))
    halves = packed.scale.astype(np.float16)
    brain = define.bfloat16_of(packed.scale)
    wide = (brain.astype(np.uint32) << 16).view(np.float32)
    define.same(
        packed.found("float32", scale=halves),
        packed.found("float32", scale=halves.astype(np.float32)),
    )
    define.same(packed.found("float32", scale=brain), packed.found("float32", scale=wide))


def bytes_exact(
    codes: NDArray[Any],
    kind: str,
    scale: NDArray[np.float32],
    zero: NDArray[Any] | None,
    block: tuple[int, int],
) -> NDArray[np.float32]:
    values = define.float8(codes, kind) if "float8" in kind else codes.astype(np.float32)
    rows, columns = codes.shape
    down, across = (n if b == -1 else b for n, b in zip(codes.shape, block, strict=True))
    at = np.ix_(np.arange(rows) // down, np.arange(columns) // across)
    with np.errstate(all="ignore"):
        if zero is not None:
            values = values - zero[at].astype(np.float32)
        return (values * scale[at]).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 32), (128, 128), (3, 7)])
def test_bytes_give_the_definition(kind: str, block: tuple[int, int]) -> None:
    for rows, columns in [(1, 1), (7, 33), (130, 300), (5, 256)]:
        dtype_of = np.int8 if kind == "int8" else np.uint8
        codes = define.random_bits(rows, (rows, columns), dtype_of)
        codes.reshape(-1)[: min(256, codes.size)] = np.arange(256, dtype=np.uint8).view(dtype_of)[
            : codes.size
        ]
        down, across = (n if b == -1 else b for n, b in zip((rows, columns), block, strict=True))
        scale = any_float(columns, (-(-rows // down), -(-columns // across)))
        zeros: list[NDArray[Any] | None] = [None]
        if "float8" not in kind:
            zeros.append(define.random_bits(4, scale.shape, dtype_of))
        for zero in zeros:
            exact = bytes_exact(codes, kind, scale, zero, block)
            for dtype in DTYPES:
                want = define.stored(exact, dtype)
                source = define.Fenced(codes)
                out = define.Fenced(np.zeros_like(want))
                odd = define.unaligned(np.zeros_like(want))
                for isa in isas():
                    options: dict[str, Any] = {"scale": scale, "block": block, "zero": zero}
                    options["dtype"] = dtype
                    dequantize_bytes(source.array, kind, out=out.array, threads=1, **options)
                    define.same(out.array, want, f"{isa} {dtype}")
                    dequantize_bytes(define.unaligned(codes), kind, out=odd, threads=1, **options)
                    define.same(odd, want, f"{isa} {dtype}")
                    part = dequantize_bytes(codes, kind, rows=(rows // 2, rows), **options)
                    define.same(part, want[rows // 2 :], f"{isa} {dtype}")


@pytest.mark.parametrize("kind", ["e8m0", "e4m3fn"])
@pytest.mark.parametrize("outer", [{}, {"divisor": 197.3}, {"factor": 0.0071}, {"divisor": 0.0}])
def test_four_bit_floats_give_the_definition(kind: str, outer: dict[str, float]) -> None:
    for rows, columns, group in [(1, 16, 16), (16, 2080, 32), (7, 96, 32), (17, 1040, 16)]:
        packed = define.random_bits(rows, (rows, columns // 2), np.uint8)
        scale = define.random_bits(columns, (rows, columns // group), np.uint8)
        scale.reshape(-1)[: min(256, scale.size)] = np.arange(256, dtype=np.uint8)[: scale.size]
        factor = define.e8m0(scale) if kind == "e8m0" else define.float8(scale, "float8_e4m3fn")
        with np.errstate(all="ignore"):
            if "divisor" in outer:
                factor = factor / np.float32(outer["divisor"])
            elif "factor" in outer:
                factor = factor * np.float32(outer["factor"])
            exact = define.float4(packed) * np.repeat(factor, group, 1)
        for dtype in DTYPES:
            want = define.stored(exact, dtype)
            source = define.Fenced(packed)
            out = define.Fenced(np.zeros_like(want))
            odd = define.unaligned(np.zeros_like(want))
            for isa in isas():
                options: dict[str, Any] = {"dtype": dtype, **outer}
                dequantize_fp4(source.array, scale, kind, out=out.array, threads=1, **options)
                define.same(out.array, want, f"{isa} {dtype}")
                dequantize_fp4(define.unaligned(packed), scale, kind, out=odd, **options)
                define.same(odd, want, f"{isa} {dtype}")
                part = dequantize_fp4(packed, scale, kind, rows=(rows // 2, rows), **options)
                define.same(part, want[rows // 2 :], f"{isa} {dtype}")


def test_eight_bit_floats_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    for kind in ("float8_e4m3fn", "float8_e5m2"):
        theirs = torch.from_numpy(codes).view(getattr(torch, kind)).to(torch.float32).numpy()
        define.same(define.float8(codes, kind), theirs, kind)
    theirs = torch.from_numpy(codes).view(torch.float8_e8m0fnu).to(torch.float32).numpy()
    define.same(define.e8m0(codes), theirs, "e8m0")


def test_refusals() -> None:
    codes = np.zeros((4, 64), np.uint8)
    scale = np.ones((4, 1), np.float32)
    with pytest.raises(ValueError, match="codes are 'float8', expected int8, uint8"):
        dequantize_bytes(codes, "float8", scale=scale, block=(1, -1))
    with pytest.raises(TypeError, match="codes is uint8, expected int8"):
        dequantize_bytes(codes, "int8", scale=scale, block=(1, -1))
    with pytest.raises(ValueError, match=r"scale has shape \(4, 1\), expected \(1, 1\)"):
        dequantize_bytes(codes, "uint8", scale=scale, block=(-1, -1))
    with pytest.raises(ValueError, match="zero is given, and float8_e4m3fn has none"):
        dequantize_bytes(codes, "float8_e4m3fn", scale=scale, block=(1, -1), zero=codes[:, :1])
    with pytest.raises(ValueError, match=r"block is \(0, 8\)"):
        dequantize_bytes(codes, "uint8", scale=scale, block=(0, 8))
    with pytest.raises(ValueError, match="scale_kind is 'e5m2'"):
        dequantize_fp4(codes, codes[:, :8].copy(), "e5m2")
    with pytest.raises(ValueError, match="scale has 16 groups for 128 columns"):
        dequantize_fp4(codes, codes[:, :16].copy(), "e8m0")
    with pytest.raises(ValueError, match="both divisor and factor"):
        dequantize_fp4(codes, codes[:, :8].copy(), "e4m3fn", divisor=1.0, factor=1.0)
    with pytest.raises(ValueError, match="dtype is 'float64'"):
        dequantize_fp4(codes, codes[:, :8].copy(), "e4m3fn", dtype="float64")
