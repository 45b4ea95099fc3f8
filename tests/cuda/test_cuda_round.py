"""Small floats on a GPU, in the emulated grid: the bytes of the CPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool import small_floats
from qtool.cuda import float_rounding
from qtool.cuda import round_tasks as tasks
from qtool.cuda.device import Device, host
from qtool.cuda.tasks import Task
from qtool.float_codes import TABLES
from qtool.methods import gptq, gptq_device, rtn
from qtool.native import small_floats as native
from qtool.scheme import Scheme
from qtool.small_floats import Search
from qtool.transforms import awq, awq_device
from support.cuda.cuda_device import device, emulator
from support.cuda.cuda_emulation import Emulator, placed, room
from support.formats.nearest_floats import FP8, MXFP4, MXFP8, NVFP4
from support.methods.sweep_reference import problem

__all__ = ["device", "emulator"]

Floats = NDArray[np.float32]
MLX = replace(NVFP4, outer="")  # of MLX, without outer
SCHEMES = {
    **FP8, "nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8, "mlx-nvfp4": MLX,
    "e5m2 tensor": Scheme(8, -1, True, "bfloat16", "e5m2", -1),
}  # fmt: skip
SHAPES = [(70, 288), (130, 48), (5, 40), (1, 128)]


def weights(rows: int, columns: int) -> Floats:
    """Heavy tails; rows of zeros, tiny, subnormal, large and of both zeros."""
    random = np.random.default_rng(rows)
    w = random.standard_t(3, (rows, columns)).astype(np.float32)
    if rows > 4:
        w[0] = 0
        w[1] *= np.float32(1e-12)
        w[2] *= np.float32(1e-39)
        w[3] *= np.float32(1e9)
        w[4] = np.where(np.arange(columns) % 2, np.float32(-0.0), np.float32(0.0))
        w[4, 40:] = np.float32(-3)
    return w


def searches(columns: int) -> list[Search | None]:
    importance = np.random.default_rng(1).lognormal(0, 2, columns).astype(np.float32)
    return [None, Search(), Search(importance)]


def same(found: Any, wanted: Any) -> None:
    """Codes, scales in their dtype, and the scale of scales."""
    for name in ("codes", "scale"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, name)
    assert found.outer == wanted.outer and found.scheme == wanted.scheme


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_same_codes_and_scales(device: Device, kind: str) -> None:
    scheme = SCHEMES[kind]
    for rows, columns in SHAPES:
        if columns % max(scheme.group_size, 1) and scheme.scale_dtype != "float16":
            columns = 96
        weight = weights(rows, columns)
        for search in searches(columns):
            for largest in (None, 0.5, 3e4):
                with np.errstate(over="ignore"):
                    wanted = small_floats.quantize(weight, scheme, largest, search)
                same(float_rounding.quantize(device, weight, scheme, largest, search), wanted)


@pytest.mark.parametrize("kind", SCHEMES)
def test_what_they_stand_for(device: Device, kind: str) -> None:
    scheme, weight = SCHEMES[kind], weights(70, 96)
    there = device.put(weight).T.contiguous()
    with np.errstate(over="ignore"):
        wanted = small_floats.rounded(weight, scheme)
    found = host(float_rounding.rounded(device, there, scheme).T.contiguous())
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_ragged_groups_and_blocks(device: Device) -> None:
    """The last of a row, and the last rows, are fewer."""
    weight = weights(37, 100)
    for scheme in (
        Scheme(8, 24, True, "float16", "e4m3"),
        Scheme(8, 3, True, "float32", "e5m2"),
        Scheme(4, 13, True, "float8_e4m3", "e2m1", outer="divides"),
        Scheme(8, 32, True, "float32", "e4m3", 16),
        Scheme(8, 128, True, "bfloat16", "e5m2", 128),
    ):
        same(float_rounding.quantize(device, weight, scheme), small_floats.quantize(weight, scheme))


@pytest.mark.parametrize("book", ["e4m3", "e5m2", "e2m1"])
def test_every_number_and_every_middle(emulator: Emulator, book: str) -> None:
    """Numbers of the book, what lies halfway between two, and its neighbours, of both signs."""
    numbers = np.unique(TABLES[book][np.isfinite(TABLES[book])])
    middles = (numbers[1:] + numbers[:-1]) / np.float32(2)
    around = [np.nextafter(m, np.float32(way)) for m in (numbers, middles) for way in (-1e9, 1e9)]
    row = np.concatenate([numbers, middles, *around]).astype(np.float32)
    weight, scale = row[None], np.ones((1, 1), np.float32)
    there, steps = placed(weight.T.copy()), placed(scale)
    for dtype, made in ((np.uint8, native.codes_of), (np.float32, native.rounded)):
        out = room((row.size, 1), dtype)
        emulator.run(tasks.round_weights(there, steps, book, row.size, out=out), out)
        wanted = made(weight, scale, book, row.size, threads=1)
        np.testing.assert_array_equal(out[:, 0].view(np.uint8), wanted[0].view(np.uint8))


@pytest.mark.parametrize("scale_dtype", ["float32", "float16", "bfloat16", "e8m0", "float8_e4m3"])
@pytest.mark.parametrize("book", ["e4m3", "e2m1"])
def test_scales_of_any_size(emulator: Emulator, book: str, scale_dtype: str) -> None:
    """Of every power of two, a little more and a little less, and of zero."""
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    tops = [powers, powers * np.float32(1.75), np.nextafter(powers, np.float32(0)), [0, 448, 6]]
    row = np.concatenate(tops).astype(np.float32)
    scheme = Scheme(4 if book == "e2m1" else 8, 1, True, scale_dtype, book)
    with np.errstate(over="ignore"):
        wanted = small_floats.first_scales(row[:, None], scheme, 1.0)
    there, out = placed(row), room(row.shape, np.float32)
    task = tasks.scales_of(there, book, scale_dtype, out=out)
    np.testing.assert_array_equal(emulator.run(task, out), wanted[:, 0])


@pytest.mark.parametrize("book", ["e4m3", "e5m2", "e2m1"])
def test_middles_of_steps_that_divide_nothing(device: Device, book: str) -> None:
    """Quotients beside the middle of two numbers, which a factor 1 / step would put elsewhere."""
    random = np.random.default_rng(7)
    numbers = TABLES[book][: {"e4m3": 127, "e5m2": 124, "e2m1": 8}[book]]
    middles = (numbers[1:].astype(np.float64) + numbers[:-1]) / 2
    scale = random.uniform(1, 2, (300, 1)).astype(np.float32)
    outer = np.float32(3.3)
    words = (middles * (scale / outer)).astype(np.float32).view(np.int32)
    words = words + random.integers(-2, 3, words.shape, dtype=np.int32)
    weight = np.ascontiguousarray(words.view(np.float32))
    there, steps = (device.put(array.T.copy()) for array in (weight, scale))
    for dtype, made in ((torch.uint8, native.codes_of), (torch.float32, native.rounded)):
        out = torch.empty(there.shape, dtype=dtype, device=device.place)
        width = weight.shape[1]
        device.launch(tasks.round_weights(there, steps, book, width, outer=outer, out=out))
        wanted = made(weight, scale, book, width, outer=outer, threads=1)
        found = host(out.T.contiguous())
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("tries", [{"steps": small_floats._FURTHER}, {"factors": (2.0, 0.5, 3.0)}])
def test_scales_that_lose_the_same_but_for_rounding(
    device: Device, tries: dict[str, Any], weighed: bool
) -> None:
    """Of equals the first is taken, by sums rounded as the CPU's; the last group is short."""
    random = np.random.default_rng(8)
    weight = random.integers(-24, 25, (3000, 19)).astype(np.float32) / np.float32(12)
    importance = (random.integers(1, 5, 19) / 3).astype(np.float32) if weighed else None
    scale = np.full((3000, 3), 1, np.float32)
    there, first = (device.put(array.T.copy()) for array in (weight, scale))
    more = {
        name: device.put(np.array(each, np.int32 if name == "steps" else np.float32))
        for name, each in tries.items()
    }
    cost = None if importance is None else device.put(importance)
    out = torch.empty(first.shape, device=device.place)
    task = tasks.search(there, first, "e2m1", 8, **more, outer=3.0, importance=cost, out=out)
    device.launch(task)
    native.best_scales(
        weight, scale, "e2m1", 8, native.Tries(**tries), outer=3.0, importance=importance
    )
    np.testing.assert_array_equal(host(out).T, scale)


def test_the_first_of_equals_and_the_ends_of_the_ladder(device: Device) -> None:
    """Zeros lose nothing whatever the scale; E4M3 has nothing below its smallest, nor above 448."""
    weight = np.zeros((3, 32), np.float32)
    weight[1], weight[2] = 1e-3, 3000
    for start in (2.0**-9, 448.0):
        scale = np.full((3, 2), start, np.float32)
        wanted = scale.copy()
        tries = native.Tries(steps=(3, -3, 200, -200))
        native.best_scales(weight, wanted, "e2m1", 16, tries)
        there, first = (device.put(array.T.copy()) for array in (weight, scale))
        steps = device.put(np.array(tries.steps, np.int32))
        out = torch.empty(2, 3, device=device.place)
        device.launch(tasks.search(there, first, "e2m1", 16, steps=steps, out=out))
        np.testing.assert_array_equal(host(out).T, wanted)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "channel", "block"])
@pytest.mark.parametrize("clip", [True, False])
def test_round_to_nearest(device: Device, kind: str, clip: bool) -> None:
    """Through the method, as a run calls it."""
    weight, scheme = weights(64, 128), SCHEMES[kind]
    options = rtn.Options(clip, 9.0 if scheme.outer else None)
    found = rtn.quantize(weight, None, scheme, options, 1, rtn.rounding_on(device)).quant
    same(found, rtn.quantize(weight, None, scheme, options).quant)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "channel", "block", "tensor"])
@pytest.mark.parametrize("mse", [True, False])
def test_grids_of_gptq(device: Device, kind: str, mse: bool) -> None:
    """Within a block of columns, where sums are in one order: codes, scales, and their scale."""
    weight, gram = problem(11, 37, 96)
    weight, scheme = np.ascontiguousarray(weight, np.float32), SCHEMES[kind]
    options = gptq.Options(token_damping=False, mse=mse)
    given = gptq.factor(gram.astype(np.float32), options)
    there = gptq_device.Factor(device.put(np.array(given.upper)), given.order, given.importance)
    launched: list[str] = []

    def launch(*given: Task) -> None:
        launched.extend(task.kernel for task in given)
        device.launch(*given)

    watched = replace(device, launch=launch)
    found = gptq_device.quantize_with(watched, weight, there, scheme, options, 9.0)
    assert "round_scales" in launched
    same(found, gptq.quantize_with(weight, given, scheme, options, 1, 9.0))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "channel", "tensor"])
def test_search_of_scales(device: Device, kind: str) -> None:
    """AWQ's errors are the CPU's but for the order of sums, and so the same scales are chosen."""
    weight, gram = problem(3, 24, 96)
    weight, cost = np.ascontiguousarray(weight, np.float32), np.diagonal(gram).astype(np.float32)
    one = awq.Measured(weight, SCHEMES[kind], cost, gram.astype(np.float32), 0.5)
    random = np.random.default_rng(5)
    scales = [np.ones(96, np.float32)]
    scales += [np.exp(random.normal(0, 0.3, 96)).astype(np.float32) for _ in range(5)]
    there = awq_device.Reader(device, one)
    for scale in scales:
        assert float(there.diagonal_error(device.put(scale))) == pytest.approx(
            awq.diagonal_error(one, scale), rel=1e-5
        )
    from qtool.streaming.workers import Workers

    wanted = awq.search([one, replace(one, share=1.0)], scales, Workers(1))
    assert awq_device.search(device, [one, replace(one, share=1.0)], scales, 3) == wanted


def test_what_a_kernel_cannot_read_is_refused() -> None:
    weight, scale, out = (room((32, 8), np.float32), room((2, 8), np.float32), room((2, 8), "f4"))
    with pytest.raises(ValueError, match="factors or steps are needed, one of them"):
        tasks.search(weight, scale, "e2m1", 16, out=out)
    with pytest.raises(ValueError, match=r"scale has shape \(2, 8\), expected \(4, 8\)"):
        tasks.search(weight, scale, "e2m1", 8, factors=room((1,), np.float32), out=out)
    with pytest.raises(ValueError, match="book is 'e3m2', expected e4m3, e5m2, e2m1"):
        tasks.round_weights(weight, scale, "e3m2", 16, out=weight)
    with pytest.raises(ValueError, match="block_rows is 0"):
        tasks.round_weights(weight, scale, "e2m1", 16, 0, out=weight)
    with pytest.raises(ValueError, match="scale_dtype is 'int8', expected float32, float16"):
        tasks.scales_of(scale, "e2m1", "int8", out=out)
