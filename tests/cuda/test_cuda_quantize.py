"""Rounding on a GPU, in the emulated grid: the bytes of the C kernels; GPTQ against its sweep."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool import grid, native, native_gguf
from qtool.cuda import quantize_tasks as tasks
from qtool.cuda import rounding
from qtool.cuda.device import Device
from qtool.gguf.gptq.levels import SWEPT, Levels, levels, together
from qtool.gguf_types import BY_NAME
from qtool.methods import gptq, gptq_device, rtn
from qtool.scheme import Scheme
from qtool.streaming.workers import Workers
from qtool.transforms import awq, awq_device
from support.cuda.cuda_device import device, emulator
from support.cuda.cuda_emulation import Emulator, placed, room
from support.methods.sweep_reference import problem, static_grid, sweep_reference

__all__ = ["device", "emulator"]

Floats = NDArray[np.float32]
SEARCH = native.RangeSearch()


def weights(rows: int, columns: int) -> Floats:
    """Heavy-tailed rows, one of zeros, one tiny, one of a single sign, one with huge numbers."""
    w = np.random.default_rng(rows).standard_t(3, (rows, columns)).astype(np.float32)
    w[0] = 0
    w[1] *= np.float32(1e-8)
    w[2] = np.abs(w[2])
    w[3] *= np.float32(2e7)
    return w


def grams(columns: int, size: int) -> Floats:
    x = np.random.default_rng(size).standard_normal((2 * columns, columns)).astype(np.float32)
    return rtn.diagonal_blocks(x.T @ x, size)


def same(device: Device, weight: Floats, **options: Any) -> None:
    """All that both make, and in the same dtypes."""
    found = rounding.quantize_groups(device, weight, dequantize=True, **options)
    wanted = native.quantize_groups(weight, dequantize=True, **options)
    for name in ("codes", "scale", "zero", "dequantized"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, f"{name} {options}")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_groups(device: Device, bits: int, symmetric: bool) -> None:
    shapes = [(40, 96, 32), (5, 50, -1), (67, 70, 32), (9, 8, 128), (4, 21, 7)]
    for rows, columns, size in shapes:
        weight = weights(rows, columns)
        options = {"bits": bits, "group_size": size, "symmetric": symmetric}
        options |= {"reach": grid.reach(bits)}
        same(device, weight, **options)
        same(device, weight, **options, search=SEARCH)
        importance = np.random.default_rng(1).lognormal(0, 2, columns).astype(np.float32)
        same(device, weight, **options, search=SEARCH, importance=importance)
        width = columns if size == -1 else min(size, columns)
        same(device, weight, **options, search=SEARCH, gram=grams(columns, width))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_scales_of_other_dtypes(device: Device, scale_dtype: str) -> None:
    for symmetric in (True, False):
        options = {"bits": 4, "group_size": 16, "symmetric": symmetric, "reach": 8.0}
        same(device, weights(33, 64), **options, scale_dtype=scale_dtype)


def test_odd_numbers(device: Device) -> None:
    """Subnormal, enormous and infinite ones, and zeros of both signs."""
    weight = weights(8, 32)
    weight[4, ::3] = np.float32(1e-41)
    weight[5, ::5] = np.float32(3e38)
    weight[6] = np.where(np.arange(32) % 2, np.float32(-0.0), np.float32(0.0))
    weight[7] = np.float32(-65504 * 15)
    for symmetric in (True, False):
        same(device, weight, bits=4, group_size=16, symmetric=symmetric, reach=8.0, search=SEARCH)


@pytest.mark.parametrize("clip", [True, False])
def test_round_to_nearest_is_the_same(device: Device, clip: bool) -> None:
    """Through the method: grids of integers there, all others here, the same bytes."""
    weight = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    there = rtn.rounding_on(device)
    for scheme in (Scheme(4, 32, True), Scheme(3, -1, False), Scheme(8, -1, True, rows=-1)):
        options = rtn.Options(clip)
        found = rtn.quantize(weight, None, scheme, options, rounding=there).quant
        wanted = rtn.quantize(weight, None, scheme, options).quant
        np.testing.assert_array_equal(found.codes, wanted.codes)
        np.testing.assert_array_equal(found.scale, wanted.scale)
        np.testing.assert_array_equal(found.zero, wanted.zero)


def test_what_a_kernel_cannot_read_is_refused(emulator: Emulator) -> None:
    weight, out = placed(weights(8, 32)), room((1, 32, 2), np.float32)
    options = tasks.Grid(4, True, 8.0)
    with pytest.raises(ValueError, match="ratios are needed"):
        tasks.find_groups(weight, options, 8, out=out, importance=room((8,), np.float32))
    with pytest.raises(ValueError, match=r"out has shape \(1, 32, 2\), expected \(2, 32, 2\)"):
        tasks.find_groups(weight, options, 4, out=out)
    with pytest.raises(ValueError, match="groups of 512, expected at most 256"):
        tasks.find_groups(
            weight, options, 512, out=out, ratios=room((2,), np.float32), gram=room((1,), np.uint8)
        )
    with pytest.raises(ValueError, match="a block of 129 columns"):
        block = room((129, 4), np.float32)
        tasks.sweep_block(block, None, None, None, 4, out=None)
    with pytest.raises(ValueError, match=r"book has shape \(2, 4\), expected \(3, 'any'\)"):
        book = room((2, 4), np.float32)
        tasks.sweep_onto_levels(room((8, 4), np.float32), None, None, None, book, True, out=None)
    with pytest.raises(ValueError, match=r"norm is 2.4, expected 2"):
        rounding.searched(
            Device(torch.device("cpu"), print, "", 0), native.RangeSearch((1.0,), 2.4)
        )


SWEEPS = [
    Scheme(4, 32, True),
    Scheme(3, 32, False),
    Scheme(4, -1, True),
    Scheme(2, 64, False),
    Scheme(8, 48, True),
]


@pytest.mark.parametrize("scheme", SWEEPS, ids=str)
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("mse", [True, False])
def test_a_block_of_the_sweep_is_that_of_the_cpu(
    device: Device, scheme: Scheme, act_order: bool, static: bool, mse: bool
) -> None:
    """Up to 128 columns in one block there is no matrix product: with the same factor the same
    codes to the bit. With grids found on the way a block is a group, and this is of the first."""
    options = gptq.Options(act_order, static, 0.01, False, mse)
    columns = 96 if static or scheme.group_size == -1 else scheme.group_size
    weight, gram = problem(1, 70, columns)
    given = gptq.factor(gram.astype(np.float32), options)
    there = gptq_device.Factor(device.put(np.array(given.upper)), given.order, given.importance)
    found = gptq_device.quantize_with(device, weight, there, scheme, options)
    wanted = gptq.quantize_with(weight, given, scheme, options)
    np.testing.assert_array_equal(found.codes, wanted.codes)
    np.testing.assert_array_equal(found.scale, wanted.scale)
    np.testing.assert_array_equal(found.zero, wanted.zero)
    if wanted.g_idx is None:
        assert found.g_idx is None
    else:
        np.testing.assert_array_equal(found.g_idx, wanted.g_idx)


@pytest.mark.parametrize(
    ("scheme", "act_order", "static"),
    [
        (Scheme(4, 64, True), True, True),
        (Scheme(3, -1, False), True, False),
        (Scheme(4, 32, False), True, False),
        (Scheme(3, 104, True), False, False),
    ],
    ids=str,
)
def test_gptq_against_its_definition(
    device: Device, scheme: Scheme, act_order: bool, static: bool
) -> None:
    """Several blocks: as near to the oracle, which solves anew at each step in float64, as the
    CPU's sweep is; and the same error of the outputs."""
    options = gptq.Options(act_order, static, 0.01, False, False)
    weight, gram = problem(2, 48, 208)
    fixed = static_grid(weight, scheme, options)
    codes, values = sweep_reference(weight, gram, scheme, options, fixed)
    there = gptq_device.factor(device.put(gram.astype(np.float32)), options)
    found = gptq_device.quantize_with(device, weight, there, scheme, options)
    assert (found.codes != codes).mean() < 0.01

    def error(dequantized: NDArray[Any]) -> float:
        lost = dequantized.astype(np.float64) - weight
        return float(((lost @ gram) * lost).sum())

    assert error(found.dequantize()) == pytest.approx(error(values), rel=0.005)


LEVELS = sorted(SWEPT)


def onto_levels(
    device: Device, weight: Floats, given: gptq.Factor, found: Levels
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes there, and the CPU's, with the same factor."""
    there = gptq_device.Factor(device.put(np.array(given.upper)), given.order, given.importance)
    wanted = native.gptq_sweep_levels(
        weight, np.asarray(given.upper), order=given.order, levels=found, threads=1
    )
    return there_on_levels(device, weight, there, found), wanted


def there_on_levels(
    device: Device, weight: Floats, given: gptq_device.Factor, found: Levels
) -> NDArray[np.uint8]:
    if found.points is not None:
        return gptq_device.codes_at_points(device, weight, given, found, threads=1)
    return gptq_device.codes_on_levels(device, weight, given, found)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("act_order", [True, False])
def test_a_block_onto_levels_is_that_of_the_cpu(device: Device, name: str, act_order: bool) -> None:
    """With the levels that the encoder fixes: the same codes to the bit."""
    columns = 128
    weight, gram = problem(4, 70, 2 * columns)
    weight = np.ascontiguousarray(weight, np.float32)
    weight[0] = 0
    weight[1] *= np.float32(1e-6)
    type_ = BY_NAME[name]
    importance = np.diagonal(gram).astype(np.float32)
    every = levels(native_gguf.encode(weight, type_, importance), type_, 2 * columns)
    groups = columns // every.width
    offset = None if every.offset is None else every.offset[:, :groups].copy()
    found = replace(every, scale=every.scale[:, :groups].copy(), offset=offset)
    options, unit = gptq.Options(act_order, True, 0.01, False), together(type_)
    given = gptq.factor(gram[:columns, :columns].astype(np.float32), options, together=unit)
    made, wanted = onto_levels(device, weight[:, :columns].copy(), given, found)
    np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("shift", [None, 0.3])
@pytest.mark.parametrize("book", ["shuffled", "whole", "halves", "one"])
def test_any_levels(device: Device, book: str, shift: float | None) -> None:
    """Numbers that occur twice, codes in any order, scales of either sign and zero, weights halfway
    between two levels; a smaller last group, and rows that fill no block of threads."""
    random = np.random.default_rng(5)
    numbers = {
        "shuffled": np.append(random.permutation(40), [7, 7, 9]) * 0.37 - 6,
        "whole": np.arange(-3, 9),
        "halves": np.arange(-3, 9) + 0.5,
        "one": np.array([2.5]),
    }[book].astype(np.float32)
    weight, gram = problem(6, 67, 100)
    weight = np.round(weight * 8).astype(np.float32) / 8
    scale = random.choice(np.array([-0.25, 0, 0.25, 0.5, 0.37], np.float32), (67, 5))
    offset = None if shift is None else random.standard_normal((67, 5)).astype(np.float32)
    found = Levels(24, scale, offset, numbers)
    for options in (gptq.Options(), gptq.Options(act_order=False)):
        given = gptq.factor(gram.astype(np.float32), options)
        made, wanted = onto_levels(device, weight, given, found)
        np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(4, 16, True, "float8_e4m3", "e2m1", 1, "divides"),
        Scheme(4, 32, True, "e8m0", "e2m1"),
        Scheme(8, -1, True, "bfloat16", "e4m3"),
        Scheme(8, 32, True, "bfloat16", "e4m3", 16),
    ],
    ids=str,
)
def test_small_floats_are_those_of_the_cpu(device: Device, scheme: Scheme) -> None:
    """Within a block of columns, where sums are in one order: codes, scales, and their scale."""
    weight, gram = problem(11, 37, 96)
    weight, options = np.ascontiguousarray(weight, np.float32), gptq.Options(token_damping=False)
    given = gptq.factor(gram.astype(np.float32), options)
    there = gptq_device.Factor(device.put(np.array(given.upper)), given.order, given.importance)
    found = gptq_device.quantize_with(device, weight, there, scheme, options, 9.0)
    wanted = gptq.quantize_with(weight, given, scheme, options, 1, 9.0)
    np.testing.assert_array_equal(found.codes, wanted.codes)
    np.testing.assert_array_equal(found.scale, wanted.scale)
    assert found.outer == wanted.outer


@pytest.mark.parametrize("name", LEVELS)
def test_blocks_onto_levels_lose_no_more(device: Device, name: str) -> None:
    """Several blocks, with a factor of its own: codes hardly differ, nor does the error."""
    weight, gram = problem(7, 48, 512)
    weight, type_ = np.ascontiguousarray(weight, np.float32), BY_NAME[name]
    importance = np.diagonal(gram).astype(np.float32)
    blocks = native_gguf.encode(weight, type_, importance)
    found = levels(blocks, type_, 512)
    options, seen = gptq.Options(token_damping=False), gram.astype(np.float32)
    unit: dict[str, Any] = {"together": together(type_)}
    given = gptq.factor(seen, options, **unit)
    there = gptq_device.factor(device.put(seen), options, **unit)
    made = there_on_levels(device, weight, there, found)
    _, wanted = onto_levels(device, weight, given, found)
    assert (made != wanted).mean() < 0.01

    def error(codes: NDArray[np.uint8]) -> float:
        values = np.repeat(found.scale, found.width, axis=1) * found.book[codes]
        if found.offset is not None:
            values -= np.repeat(found.offset, found.width, axis=1)
        lost = values.astype(np.float64) - weight
        return float(((lost @ gram) * lost).sum())

    assert error(made) == pytest.approx(error(wanted), rel=0.005)


@pytest.mark.parametrize("with_gram", [True, False])
def test_search_of_scales(device: Device, with_gram: bool) -> None:
    """AWQ's errors are the CPU's but for the order of sums, and so the same scales are chosen."""
    random = np.random.default_rng(5)
    measured = []
    for scheme, rows in ((Scheme(4, 32, False), 24), (Scheme(3, -1, True), 17)):
        weight, gram = problem(rows, rows, 96)
        gram = gram.astype(np.float32)
        cost = np.diagonal(gram).astype(np.float32)
        measured.append(awq.Measured(weight, scheme, cost, gram if with_gram else None, 0.5))
    scales = [np.ones(96, np.float32)]
    scales += [np.exp(random.normal(0, 0.3, 96)).astype(np.float32) for _ in range(7)]
    for one in measured:
        there = awq_device.Reader(device, one)
        for scale in scales:
            on_device = device.put(scale)
            found = float(there.diagonal_error(on_device))
            assert found == pytest.approx(awq.diagonal_error(one, scale), rel=1e-5)
            if one.gram is not None:
                found = float(there.output_error(on_device, device.put(one.gram)))
                assert found == pytest.approx(awq.output_error(one, scale), rel=1e-4)
    with Workers(1) as workers:
        wanted = awq.search(measured, scales, workers)
        assert awq_device.search(device, measured, scales, 4) == wanted
        assert awq_device.search(device, measured, scales[::-1], 4) == 7 - wanted


def test_factor_on_the_device(device: Device) -> None:
    """Against the CPU's, with dead channels, columns that stay neighbours, and a damping that had
    to be raised."""
    _, gram = problem(3, 4, 300)
    gram[7] = gram[:, 7] = 0
    seen = gram.astype(np.float32)
    for options, unit in ((gptq.Options(), 1), (gptq.Options(act_order=False), 1),
                          (gptq.Options(), 4)):  # fmt: skip
        wanted = gptq.factor(seen, options, 2000, together=unit)
        found = gptq_device.factor(device.put(seen), options, 2000, together=unit)
        np.testing.assert_array_equal(found.order, wanted.order)
        assert found.notes == wanted.notes and "1 of 300" in found.notes[0]
        np.testing.assert_allclose(found.importance, wanted.importance, rtol=1e-4)
        upper = found.on_host.upper
        assert np.abs(np.tril(upper, -1)).max() == 0
        np.testing.assert_allclose(upper, wanted.upper, atol=1e-4 * np.abs(wanted.upper).max())
        if unit == 1:
            cost = gptq_device.importance(device.put(seen), options, 2000)
            np.testing.assert_array_equal(cost, found.importance)
    rank_one = np.outer(np.arange(1, 65), np.arange(1, 65)).astype(np.float32)
    options = gptq.Options(damp_percent=1e-9)
    found = gptq_device.factor(device.put(rank_one), options)
    wanted = gptq.factor(rank_one, options)
    assert "damping raised" in found.notes[0] and "damping raised" in wanted.notes[0]
