"""The machine that runs PTX (tests/support/ptx): numbers that are known, and errors to be
found."""

from fractions import Fraction

import numpy as np
import pytest

from support.cuda.cuda_emulation import Emulator, emulator
from support.cuda.ptx_by_hand import launch, words
from support.ptx import machine, tensor

__all__ = ["emulator"]

NAN = 0x7FFFFFFF


def bits(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def check(body: str, want: list[int], *given: object) -> None:
    found = words(body, *given)[: len(want)]
    assert found.tolist() == [int(value) % (1 << 32) for value in want], body


def test_shifts_are_clamped() -> None:
    amounts = np.array([0, 1, 31, 32, 33, 40, 64, 1 << 31], np.uint32)
    value = np.full(8, 0x80000001, np.uint32)
    check("shl.b32 %r0, %r1, %r2;", [0x80000001, 2, 1 << 31] + [0] * 5, value, amounts)
    check("shr.u32 %r0, %r1, %r2;", [0x80000001, 1 << 30, 1] + [0] * 5, value, amounts)
    check("shr.s32 %r0, %r1, %r2;", [0x80000001, 0xC0000000] + [-1] * 6, value, amounts)
    check("shl.b32 %r0, %r1, 33;", [0], value)
    check("shr.s32 %r0, %r1, 40;", [-1], value)
    wide = "cvt.u64.u32 %rd1, %r1; shl.b64 %rd2, %rd1, 32; {}"
    wide += "shr.u64 %rd4, %rd3, 32; cvt.u32.u64 %r0, %rd4;"
    check(wide.format("shr.s64 %rd3, %rd2, %r2;"), [0x80000001, 0xC0000000], value, amounts)
    check(wide.format("shr.u64 %rd3, %rd2, 64;"), [0], value)


def test_integers() -> None:
    check("mul.hi.s32 %r0, %r1, %r2;", [-1, 0x3FFFFFFF], [-1, 0x7FFFFFFF], [5, 0x7FFFFFFF])
    check("mul.hi.u32 %r0, %r1, %r2;", [4], [0xFFFFFFFF], [5])
    check("div.s32 %r0, %r1, %r2;", [-3, -3, 3, 0], [-7, 7, -7, 1], [2, -2, -2, 5])
    check("rem.s32 %r0, %r1, %r2;", [-1, 1, -1, 1], [-7, 7, -7, 1], [2, -2, -2, 5])
    check("bfi.b32 %r0, %r1, %r2, 8, 4;", [0xFFFFF5FF], [0x35], [0xFFFFFFFF])
    check("bfe.u32 %r0, %r1, 8, 4;", [5], [0x12345678 & ~0xF00 | 0x500])
    dp2a = [0x00030005], [0x0B0D1113], [100]  # 5 and 3 by the two low bytes, or the two high ones
    check("dp2a.lo.u32.u32 %r0, %r1, %r2, %r3;", [100 + 5 * 0x13 + 3 * 0x11], *dp2a)
    check("dp2a.hi.u32.u32 %r0, %r1, %r2, %r3;", [100 + 5 * 0x0D + 3 * 0x0B], *dp2a)
    check("clz.b32 %r0, %r1;", [32, 31, 0, 8], [0, 1, 0x80000000, 0xFFFFFF])
    check("lop3.b32 %r0, %r1, %r2, %r3, 0x96;", [0b1001 ^ 0b0101 ^ 0b0011], [9], [5], [3])
    check("lop3.b32 %r0, %r1, %r2, %r3, 0xea;", [0b0011 | 0b0001], [9], [5], [3])
    check("cvt.s32.s8 %r0, %r1;", [-128, 127], [0x180, 0x7F])
    check("cvt.u16.u32 %h1, %r1; cvt.s32.s16 %r0, %h1;", [-1], [0x1FFFF])
    check("setp.lt.s32 %p1, %r1, %r2; selp.u32 %r0, 1, 2, %p1;", [1, 2], [-1, 1], [1, -1])
    check("setp.lt.u32 %p1, %r1, %r2; selp.u32 %r0, 1, 2, %p1;", [2, 1], [-1, 1], [1, -1])
    check("mov.b32 {%h1, %h2}, %r1; mov.b32 %r0, {%h2, %h1};", [0x56781234], [0x12345678])
    check("{.reg .b16 l, h; mov.b32 {l, h}, %r1; mov.b32 %r0, {h, h};}", [0x12341234], [0x12345678])


def test_bytes_are_permuted() -> None:
    a, b = [0x83828180], [0x07060504]
    check("prmt.b32 %r0, %r1, %r2, 0x7410;", [0x07048180], a, b)
    check("prmt.b32 %r0, %r1, %r2, 0xba98;", [0xFFFFFFFF], a, b)
    check("prmt.b32 %r0, %r1, %r2, 0x7410U;", [0x07048180], a, b)
    check("prmt.b32 %r0, %r1, %r2, 0xfe0c;", [0x0000_8000], a, b)
    check("prmt.b32 %r0, %r1, %r2, %r3;", [0x07048180, 0xFF], a * 2, b * 2, [0x7410, 0xFFF8])


def test_a_fused_product_is_rounded_once() -> None:
    """Also where float64 would round the sum to what lies halfway between two float32."""
    given = bits([1 + 2**-23, 24929.0]), bits([1 + 2**-23, 673.0]), bits([-1 - 2**-22, 2.0**-30])
    check("fma.rn.f32 %f0, %f1, %f2, %f3; mov.b32 %r0, %f0;", bits([2.0**-46, 16777218]), *given)
    check("mul.rn.f16x2 %r0, %r1, %r2;", [0x7FFF3E02], [0x7C003C01], [0x00003E00])
    check("add.rn.f16x2 %r0, %r1, %r2;", [0x3C023C00], [0x3C013C00], [0x10001000])
    random = np.random.default_rng(0)
    values = [(random.integers(0, 1 << 16, 512) & 0xBFFF).astype(np.uint16) for _ in range(3)]
    values = [np.where((v & 0x7C00) == 0x7C00, v & 0x83FF, v) for v in values]
    found = words("fma.rn.f16x2 %r0, %r1, %r2, %r3;", *values, threads=512) & 0xFFFF
    for got, *one in zip(found.astype(np.uint16).view(np.float16), *values, strict=True):
        a, b, c = (Fraction(float(v.view(np.float16))) for v in one)
        exact = a * b + c
        lower, upper = (np.nextafter(got, np.float16(side)) for side in (-np.inf, np.inf))
        if np.isfinite(got):
            apart = abs(Fraction(float(got)) - exact)
            assert all(
                apart <= abs(Fraction(float(x)) - exact) for x in (lower, upper) if np.isfinite(x)
            )
        else:
            assert abs(exact) >= 65520


def test_floats() -> None:
    tiny = 2.0**-149
    check("mul.rn.f32 %f0, %f1, %f2; mov.b32 %r0, %f0;", [1, 0], bits([tiny, tiny]), bits([1, 0.5]))
    nan, inf = float("nan"), float("inf")
    pairs = bits([nan, 1, nan, -0.0, 0.0]), bits([2, nan, nan, 0.0, -0.0])
    check(
        "min.f32 %f0, %f1, %f2; mov.b32 %r0, %f0;", [*bits([2, 1]), NAN, 1 << 31, 1 << 31], *pairs
    )
    check("max.f32 %f0, %f1, %f2; mov.b32 %r0, %f0;", [*bits([2, 1]), NAN, 0, 0], *pairs)
    check(
        "sub.rn.f32 %f0, %f1, %f2; mov.b32 %r0, %f0;", [NAN, NAN], bits([inf, nan]), bits([inf, 1])
    )
    for how, want in {"lt": [1, 0, 0], "ltu": [1, 0, 1], "neu": [1, 0, 1], "ne": [1, 0, 0],
                      "num": [1, 1, 0], "nan": [0, 0, 1], "equ": [0, 1, 1]}.items():  # fmt: skip
        check(f"setp.{how}.f32 %p1, %f1, %f2; selp.u32 %r0, 1, 0, %p1;", want,
              bits([1, 2, nan]), bits([2, 2, 2]))  # fmt: skip
    check(
        "copysign.f32 %f0, %f1, %f2; mov.b32 %r0, %f0;", bits([-3, 3]), bits([-1, 1]), bits([3, -3])
    )


def test_conversions() -> None:
    nan, inf = float("nan"), float("inf")
    given = bits([2.5, 3.5, -2.5, 3e9, -3e9, nan, inf])
    ends = [0x7FFFFFFF, -0x80000000, 0, 0x7FFFFFFF]
    check("cvt.rni.s32.f32 %r0, %f1;", [2, 4, -2, *ends], given)
    check("cvt.rzi.s32.f32 %r0, %f1;", [2, 3, -2, *ends], given)
    check("cvt.rzi.u32.f32 %r0, %f1;", [2, 3, 0, 3000000000, 0, 0, 0xFFFFFFFF], given)
    half = "cvt.rn.f16.f32 %h1, %f1; cvt.u32.u16 %r0, %h1;"
    ties = bits([65519, 65520, -inf, nan, 2.0**-25, 3 * 2.0**-25, 1 + 2.0**-11, 1 + 3 * 2.0**-11])
    check(half, [0x7BFF, 0x7C00, 0xFC00, 0x7FFF, 0, 2, 0x3C00, 0x3C02], ties)
    both = bits([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, nan]), bits([1, 2, 3, 4])
    check("cvt.rn.bf16x2.f32 %r0, %f1, %f2;",
          [0x3F803F80, 0x3F824000, 0x7F804040, 0x7FFF4080], *both)  # fmt: skip
    check("cvt.rn.f16x2.f32 %r0, %f2, %f1;", [0x40003C00], bits([1]), bits([2]))
    every = np.arange(1 << 16, dtype=np.uint32)
    back = words("cvt.u16.u32 %h1, %r1; cvt.f32.f16 %f0, %h1; mov.b32 %r0, %f0;", every,
                 threads=1 << 16)  # fmt: skip
    want = every.astype(np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(back.view(np.float32), want)


@pytest.mark.parametrize("core", [machine.HOPPER, machine.AMPERE])
def test_a_tensor_core_is_that_of_the_host(emulator: Emulator, core: tuple[int, int]) -> None:
    """Of random halves, of which some are subnormal, and sums of any size."""
    random = np.random.default_rng(1)
    a, b = (random.integers(0, 1 << 16, (60, 16)).astype(np.uint16) & 0xBFFF for _ in range(2))
    a[:20] &= 0x83FF
    sums = (random.standard_normal(60) * np.exp2(random.integers(-30, 9, 60))).astype(np.float32)
    found = sums
    for k in range(0, 16, core[1]):
        found = tensor.fused(a[:, k : k + core[1]], b[:, k : k + core[1]], found, core[0])
    for row in range(60):
        halves = [x[row].view(np.float16).tolist() for x in (a, b)]
        want = emulator.tensor_core(*core, *halves, float(sums[row]))
        assert found[row] == np.float32(want), row


def test_the_places_of_a_product() -> None:
    """Of small integers, by a kernel: d = a b + c for two warps."""
    random = np.random.default_rng(2)
    rows, vectors = random.integers(-4, 5, (2, 16, 16)), random.integers(-4, 5, (2, 16, 8))
    sums, lane = random.integers(-9, 9, (2, 16, 8)), np.arange(64) % 32
    warp, g, t = np.arange(64) // 32, lane // 4, lane % 4

    def pair(matrix: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        both = np.stack([first, second], -1).astype(np.float16)
        return both.view(np.uint32).reshape(-1)

    given = {}
    for k in range(4):
        row, col = g + 8 * (k & 1), 2 * t + 8 * (k >> 1)
        given[f"a{k}"] = pair(rows, rows[warp, row, col], rows[warp, row, col + 1])
    for k in range(2):
        col = 2 * t + 8 * k
        given[f"b{k}"] = pair(vectors, vectors[warp, col, g], vectors[warp, col + 1, g])
    for k in range(4):
        row, col = g + 8 * (k >> 1), 2 * t + (k & 1)
        given[f"c{k}"] = sums[warp, row, col].astype(np.float32)
    loads = "".join(f"ld.global.b32 %r{k}, [%rd{10 + k}];" for k in range(6))
    loads += "".join(f"ld.global.f32 %f{k}, [%rd{16 + k}];" for k in range(4))
    stores = "".join(f"st.global.f32 [%rd{16 + k}], %f{10 + k};" for k in range(4))
    name = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    product = f"{name} {{%f10, %f11, %f12, %f13}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}},"
    product += "{%f0, %f1, %f2, %f3};"
    assert launch(loads + product + stores, 64, **given) is None
    want = np.einsum("wij,wjk->wik", rows, vectors) + sums
    for k in range(4):
        row, col = g + 8 * (k >> 1), 2 * t + (k & 1)
        np.testing.assert_array_equal(given[f"c{k}"], want[warp, row, col])
    some = "setp.eq.s32 %p1, %r70, 3; @%p1 bra $over; " + product + " $over: " + stores
    assert "mma.sync by a part of a warp" in str(launch(loads + some, 64, **given))


@pytest.mark.parametrize(
    "unknown",
    ["sin.approx.f32 %f0, %f1;", "add.ftz.f32 %f0, %f1, %f1;", "add.sat.s32 %r0, %r1, %r1;",
     "shfl.sync.bfly.b32 %r0, %r1, 1, 31, -1;", "bar.sync 1;", "cvt.rz.f16.f32 %h0, %f1;",
     "ld.volatile.global.u32 %r0, [%rd10];", "mul.rn.ftz.f32 %f0, %f1, %f1;"],
)  # fmt: skip
def test_what_it_does_not_know_it_does_not_run(unknown: str) -> None:
    name = unknown.split()[0]
    ready = "mov.u32 %r1, 0; mov.f32 %f1, 0f00000000;"
    with pytest.raises(NotImplementedError, match=name):
        launch(ready + unknown, out=np.zeros(32, np.uint32))
