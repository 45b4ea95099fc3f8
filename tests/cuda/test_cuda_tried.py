"""Kernels of tests/gpu/tried.h: in the emulated grid, as PTX (QTOOL_TEST_DEVICE=ptx) and on a GPU.
What they give is qtool's own, bit for bit, or as near to exact sums."""

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest

from qtool import native_gguf
from qtool.cuda import compiling, more_tasks
from qtool.gguf_types import BY_NAME
from support.cuda.cuda_emulation import Emulator, OnGpu, emulator, placed, room
from support.cuda.gemv_tasks import (
    awq_tasks,
    gptq_tasks,
    inputs,
    of_layout,
    product,
    q4_k_tasks,
    results,
    small_integers,
)
from support.cuda.tried_kernels import TEXT, TRIED, by, compiled, tried
from support.kernels import packed_definitions as define
from support.kernels.random_matrices import random_blocks, random_quant

__all__ = ["compiled", "emulator"]


def test_all_are_listed() -> None:
    assert len(TRIED) == TEXT.count("X(tried_") > 5
    assert {layout for layout, *_ in TRIED.values()} == set(more_tasks._BLOCKS)
    assert {TRIED[name][0] for name in ALIKE} == set(more_tasks._BLOCKS)


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize(("batch", "splits"), [(1, 1), (3, 2), (8, 3)])
def test_as_near_as_sums_in_float32(emulator: Emulator, name: str, batch: int, splits: int) -> None:
    """Of as many turns as a warp has places for, fewer, and more; of several blocks of rows."""
    for shape in [(256, 512), (128, 2816)]:
        exact, make, terms, floor = of_layout(TRIED[name][0], shape)
        x = inputs(batch, shape[1])
        product(emulator, by(name, make(x), splits), x, exact, terms, floor)


@pytest.mark.parametrize("name", TRIED)
def test_sums_that_are_exact(emulator: Emulator, name: str) -> None:
    """Bit for bit, whatever the order."""
    layout, x = TRIED[name][0], small_integers(5, 1536)
    if layout == "q4_k":
        given = np.ascontiguousarray(random_blocks(BY_NAME["Q4_K"], 6 * 64))
        blocks = placed(given.reshape(64, -1))
        heads = blocks.reshape(-1, 144)[:, :4].view(np.float16)
        heads[...] = np.exp2(np.random.default_rng(2).integers(-12, -8, heads.shape))
        exact = native_gguf.dequantize(blocks, BY_NAME["Q4_K"], 1536).astype(np.float64)
        make = q4_k_tasks(blocks, 1536, x)
    else:
        quant = random_quant(4, (192, 1536), 128)
        powers = np.exp2(np.random.default_rng(1).integers(-8, -4, quant.scale.shape))
        quant = dataclasses.replace(quant, scale=powers.astype(np.float16))
        exact = quant.dequantize().astype(np.float64)
        make = awq_tasks(quant, x) if layout == "across" else gptq_tasks(quant, x, 2)
    want = (x.astype(np.float64) @ exact.T).astype(np.float16)
    for splits in (1, 2):
        tasks = by(name, make, splits)
        define.same(results(emulator, tasks, x, len(exact))[-1], want, f"{splits}")


ALIKE = [
    name
    for name, (layout, threads, abreast, _) in TRIED.items()
    if threads // 32 // abreast == more_tasks._BLOCKS[layout][1]
]


@pytest.mark.parametrize("name", ALIKE)
def test_the_same_bits_as_qtools_own(emulator: Emulator, name: str) -> None:
    """Of those whose warps share columns as qtool's do, whatever the way by which weights come."""
    layout = TRIED[name][0]
    shape = (2 * more_tasks._BLOCKS[layout][0], 2816)
    _, make, _, _ = of_layout(layout, shape)
    tasks = make(inputs(4, shape[1]))  # which has the arrays
    own, other = (room((4, shape[0]), np.float16) for _ in range(2))
    with patch.object(more_tasks, "splits_of", lambda *_: 1):
        (task,) = tasks(own, None, None)
    emulator.run(task, own)
    (task,) = by(name, tasks, 1)(other, None, None)
    define.same(emulator.run(task, other), own)


@pytest.mark.parametrize("name", TRIED)
def test_places_are_watched(emulator: Emulator, name: str) -> None:
    """A matrix that ends too early is read outside of it."""
    if isinstance(emulator, OnGpu):
        pytest.skip("a GPU says nothing")
    layout = TRIED[name][0]
    _, make, _, _ = of_layout(layout, (128, 1024))
    tasks, out = make(inputs(1, 1024)), room((1, 128), np.float16)
    (task,) = by(name, tasks, 1)(out, None, None)
    short = {**task.fields, "codes_bytes": task.fields["codes_bytes"] - 16}
    said = emulator.fault(dataclasses.replace(task, fields=short), out.size)
    assert said is not None and "read outside" in said


@pytest.mark.parametrize(
    ("kind", "number"),
    [("awq", 3), ("gptq", 9), ("gptq", -7), ("gptq", -1), ("q4_k", 2), ("q4_k", 6), ("q4_k", -1)],
)
def test_those_that_are_timed_compile(kind: str, number: int) -> None:
    """By NVRTC, as there; of rings, that they take the memory that their launch asks for."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: make cuda-ptx")
    kernel = tried.kernels_of(kind)[number]
    assert b"gemv_tried" in compiling.compile_source("tried", kernel.unit, "sm_90")
