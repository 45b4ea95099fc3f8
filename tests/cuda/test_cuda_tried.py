"""Kernels of tests/gpu/tried.h: in the emulated grid, as PTX (QTOOL_TEST_DEVICE=ptx) and on a GPU.
What they give is qtool's own, bit for bit, or as near to exact sums."""

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest

from qtool import native_gguf
from qtool.cuda import compiling, pack_gemv_tasks
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
from support.cuda.tried_kernels import ROOMY, TEXT, TRIED, by, compiled, tried
from support.kernels import packed_definitions as define
from support.kernels.random_matrices import random_blocks, random_quant

__all__ = ["compiled", "emulator"]


@pytest.fixture(autouse=True)
def roomy(emulator: Emulator, request: pytest.FixtureRequest) -> None:
    """Only gemv.py, which compares results, too, launches these on a GPU."""
    given = getattr(request.node, "callspec", None)
    if isinstance(emulator, OnGpu) and given and given.params.get("name") in ROOMY:
        pytest.skip("the driver has to be asked for its shared memory before")


def test_all_are_listed() -> None:
    assert len(TRIED) == TEXT.count("X(tried_") > 5
    assert min(ROOMY.values()) > tried.OWN_ROOM
    assert {layout for layout, *_ in TRIED.values()} == set(pack_gemv_tasks._BLOCKS)
    assert {TRIED[name][0] for name in ALIKE} == set(pack_gemv_tasks._BLOCKS)


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize(("batch", "splits"), [(1, 1), (3, 2), (8, 3)])
def test_as_near_as_sums_in_float32(emulator: Emulator, name: str, batch: int, splits: int) -> None:
    """Of as many turns as a warp has places for, fewer, and more; of several blocks of rows."""
    for shape in [(256, 512), (max(128, TRIED[name][3]), 2816)]:
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
        quant = random_quant(4, (3 * max(64, TRIED[name][3]), 1536), 128)
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
    if threads // 32 // abreast == pack_gemv_tasks._BLOCKS[layout][1]
]


@pytest.mark.parametrize("name", ALIKE)
def test_the_same_bits_as_qtools_own(emulator: Emulator, name: str) -> None:
    """Of those whose warps share columns as qtool's do, whatever the way by which weights come."""
    layout = TRIED[name][0]
    shape = (2 * pack_gemv_tasks._BLOCKS[layout][0], 2816)
    _, make, _, _ = of_layout(layout, shape)
    tasks = make(inputs(4, shape[1]))  # which has the arrays
    own, other = (room((4, shape[0]), np.float16) for _ in range(2))
    with patch.object(pack_gemv_tasks, "splits_of", lambda *_: 1):
        (task,) = tasks(own, None, None)
    emulator.run(task, own)
    (task,) = by(name, tasks, 1)(other, None, None)
    define.same(emulator.run(task, other), own)


@pytest.mark.parametrize("name", TRIED)
def test_places_are_watched(emulator: Emulator, name: str) -> None:
    """A matrix that ends too early is read outside of it."""
    if isinstance(emulator, OnGpu):
        pytest.skip("a GPU says nothing")
    rows = max(128, TRIED[name][3])
    _, make, _, _ = of_layout(TRIED[name][0], (rows, 1024))
    tasks, out = make(inputs(1, 1024)), room((1, rows), np.float16)
    (task,) = by(name, tasks, 1)(out, None, None)
    short = {**task.fields, "codes_bytes": task.fields["codes_bytes"] - 16}
    said = emulator.fault(dataclasses.replace(task, fields=short), out.size)
    assert said is not None and "read outside" in said


KERNELS = {str(kernel): kernel for kind in tried.NAMES for kernel in tried.kernels_of(kind)}


@pytest.mark.parametrize(
    "name",
    [
        "awq 512-8-1",
        "awq ahead-256-2-2-0",
        "awq wide-512-4-1-2-128",
        "awq broad-256-2-1-2-128",
        "gptq ring-128-1-2-4",
        "gptq ring-256-1-4-2-32",
        "gptq bulk-256-1-4-2-32",
        "q4_k early-128-1-2-4",
        "q4_k ring-256-2-2-2",
        "q4_k bulk-256-2-2-2",
    ],
)
def test_those_that_are_timed_compile(name: str) -> None:
    """By NVRTC, as there; that they take the memory that their launch asks for."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: make cuda-ptx")
    assert b"gemv_tried" in compiling.compile_source("tried", KERNELS[name].unit, "sm_90")


MOST_ROOM = (228 << 10) // 2 - 1024  # bytes that two blocks of an SM of sm_90 may have each


@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 8192), (14336, 4096)])
@pytest.mark.parametrize("rows", [64, 128])
def test_awq_has_some_beside_which_the_next_begins(shape: tuple[int, int], rows: int) -> None:
    """Where a block takes half of an SM at most, by some number of blocks that is not above that of
    SMs, nor far below it, and of which each has asked for all of its own before it waits, or for
    64 KB."""
    found = []
    for kernel in tried.kernels_of("awq"):
        down, parts, _, resident = kernel.blocks
        if not kernel.shared or resident < 2 or kernel.room > MOST_ROOM or kernel.rows != rows:
            continue
        turns, runs = kernel.numbers[2], shape[1] // tried.COLUMNS["awq"]
        splits = 132 // (shape[0] // down)
        asked = min(turns * parts, runs // max(1, splits)) * down * tried.PLACES["awq"]
        all_ = splits * parts * turns >= runs
        if splits and splits * (shape[0] // down) >= 100 and (all_ or asked >= 64 << 10):
            found.append(kernel.name)
    assert len(found) > 1
