"""CUDA kernels that pack and that multiply, on the host: exact words, and sums against float64."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from qtool import native, native_gguf
from qtool.cuda import pack_gemv_tasks
from qtool.formats import gptq
from qtool.formats.facts import Options
from qtool.gguf_types import BY_NAME
from qtool.native.packing import words_shape
from support.cuda.cuda_emulation import Emulator, emulator, placed, room
from support.cuda.gemv_tasks import (
    awq_tasks,
    gptq_tasks,
    inputs,
    of_layout,
    parts_of_q4_k,
    product,
    q4_k_tasks,
    results,
    small_integers,
)
from support.kernels import packed_definitions as define
from support.kernels.random_matrices import random_blocks, random_quant

__all__ = ["emulator"]

WIDTHS = [("across", 4), *((name, bits) for name in ("columns", "rows") for bits in (2, 3, 4, 8))]


@pytest.mark.parametrize(("layout", "bits"), WIDTHS)
def test_pack(emulator: Emulator, layout: str, bits: int) -> None:
    for shape in [(8, 64), (72, 1088), (5, 37), (17, 1030), (200, 130), (1, 1)]:
        if layout == "across" and shape[0] % 8:
            continue
        codes = placed(define.random_bits(bits, shape, np.uint8) & np.uint8((1 << bits) - 1))
        out = room(words_shape(shape, bits, layout), np.int32)
        for order in (0, 1):
            task = pack_gemv_tasks.pack(codes, bits, layout, out=out)
            found = emulator.run(task, out, order)
            np.testing.assert_array_equal(found, native.pack(codes, bits, layout), str(shape))


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("batch", range(1, 9))
def test_awq_times_vectors(emulator: Emulator, batch: int, heavy: bool) -> None:
    for shape, size in [((256, 512), 128), ((264, 96), 32), ((8, 1024), 128)]:
        quant = random_quant(4, shape, size)
        x, exact = inputs(batch, shape[1], heavy), quant.dequantize().astype(np.float64)
        product(emulator, awq_tasks(quant, x), x, exact, np.abs(exact))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("batch", range(1, 9))
def test_gptq_times_vectors(emulator: Emulator, batch: int, version: int) -> None:
    for shape, size in [((128, 512), 128), ((264, 96), 32), ((8, 1024), -1), ((72, 192), 96)]:
        quant = random_quant(4, shape, size, symmetric=version == 1)
        exact = quant.dequantize().astype(np.float64)
        for heavy in (False, True):
            x = inputs(batch, shape[1], heavy)
            product(emulator, gptq_tasks(quant, x, version), x, exact, np.abs(exact))


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("batch", range(1, 9))
def test_q4_k_times_vectors(emulator: Emulator, batch: int, heavy: bool) -> None:
    q4_k = BY_NAME["Q4_K"]
    for rows, columns in [(5, 256), (160, 1024), (3, 4352)]:
        weight = np.random.default_rng(rows).standard_normal((rows, columns), np.float32)
        blocks = placed(native_gguf.encode(weight, q4_k))
        positive, less, floor = parts_of_q4_k(blocks)
        rounded = native_gguf.dequantize(blocks, q4_k, columns)
        np.testing.assert_array_equal((positive - less).astype(np.float32), rounded)
        x = inputs(batch, columns, heavy)
        tasks = q4_k_tasks(blocks, columns, x)
        product(emulator, tasks, x, positive - less, positive + less, floor)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("layout", "runs"), [("across", 128), ("columns", 128), ("q4_k", 256)])
def test_turns_after_turns(emulator: Emulator, layout: str, runs: int, batch: int) -> None:
    """Of every warp more than are on their way at once: what a ring held is written over."""
    shape = (40, 20 * runs)
    exact, make, terms, floor = of_layout(layout, shape)
    x = inputs(batch, shape[1])
    with patch.object(pack_gemv_tasks, "splits_of", lambda *_: 1):
        product(emulator, make(x), x, exact, terms, floor)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_sums_that_are_exact(emulator: Emulator, batch: int) -> None:
    """Of small integers, and scales that are powers of two, results are those of integers, bit for
    bit: whatever the order, and on any tensor core."""
    x = small_integers(batch, 1024)
    quant = random_quant(4, (200, 1024), 128)
    powers = np.exp2(np.random.default_rng(1).integers(-8, -4, quant.scale.shape))
    quant = dataclasses.replace(quant, scale=powers.astype(np.float16))
    exact = quant.dequantize().astype(np.float64)
    want = (x.astype(np.float64) @ exact.T).astype(np.float16)
    for tasks in (awq_tasks(quant, x), gptq_tasks(quant, x, 2)):
        define.same(results(emulator, tasks, x, 200)[-1], want)
    blocks = random_blocks(BY_NAME["Q4_K"], 4 * 40)
    blocks = placed(np.ascontiguousarray(blocks).reshape(40, -1))
    heads = blocks.reshape(-1, 144)[:, :4].view(np.float16)
    heads[...] = np.exp2(np.random.default_rng(2).integers(-12, -8, heads.shape))
    exact = native_gguf.dequantize(blocks, BY_NAME["Q4_K"], 1024).astype(np.float64)
    want = (x.astype(np.float64) @ exact.T).astype(np.float16)
    define.same(results(emulator, q4_k_tasks(blocks, 1024, x), x, 40)[-1], want)


def test_what_is_past_the_batch_is_not_looked_at(emulator: Emulator) -> None:
    """An infinite input makes its own vector infinite or NaN and no other one."""
    quant = random_quant(4, (72, 256), 128)
    x = inputs(3, 256)
    before = results(emulator, awq_tasks(quant, x), x, 72)[-1].copy()
    x[1, 7] = np.inf
    after = results(emulator, awq_tasks(quant, x), x, 72)[-1]
    assert not np.isfinite(after[1]).any()
    define.same(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(("fraction", "columns"), [(25, 16), (24, 8)])
def test_a_tensor_core_as_published(emulator: Emulator, fraction: int, columns: int) -> None:
    """What is lost of terms beside a larger one, by hand."""

    def sum_of(a: list[float], b: list[float], before: float = 0.0) -> float:
        return emulator.tensor_core(fraction, columns, a, b, before)

    ones, tiny = [1.0] + [2.0**-12] * 15, [1.0] + [2.0**-13] * 15  # products 1 and 2^-25
    assert sum_of(ones, tiny) == (1 + 3 * 2.0**-23 if fraction == 25 else 1.0)
    assert sum_of([-a for a in ones], tiny) == -sum_of(ones, tiny)
    assert sum_of([1.0], [1.0], 2.0**-23) == 1 + 2.0**-23
    assert sum_of([2.0**-12], [2.0**-14], 1.0) == 1.0
    # A subnormal number counts as 2^-14 where terms are aligned.
    assert sum_of([2.0**-24, 2.0**-24], [1.0, 2.0**-14]) == 2.0**-24 + 2.0**-38
    assert sum_of([2.0**-24, 2.0**-24], [1.0, 2.0**-16]) == 2.0**-24
    assert sum_of([2.0**-14, 2.0**-24], [2.0**-10, 2.0**-16]) == 2.0**-24 + 2.0**-40
    # Eight columns of sixteen at once, or all.
    late = [2.0**-12] * 8 + [1.0] * 2
    assert sum_of(late, [2.0**-13] * 8 + [1.0, -1.0]) == 8 * 2.0**-25
    assert sum_of([1.0, 2.0**-12] + [0.0] * 7 + [1.0], [1.0, 2.0**-14] + [0.0] * 7 + [-1.0]) == 0
    assert sum_of([3.0], [0.0], 5.0) == 5.0
    assert np.isnan(sum_of([np.inf, 1.0], [0.0, 1.0]))


def test_every_one_of_them_is_compared(emulator: Emulator) -> None:
    made = {name for name in emulator.kernels() if name.startswith(("pack_", "gemv_"))}
    gemv = {"gemv_across_4", "gemv_columns_4", "gemv_q4_k", "gemv_sum"}
    assert made == {f"pack_{layout}_{bits}" for layout, bits in WIDTHS} | gemv


def test_refusals() -> None:
    codes, out = placed(np.zeros((8, 64), np.uint8)), room((8, 6), np.int32)
    with pytest.raises(ValueError, match="layout rows with 5 bits, expected across 4, columns 2"):
        pack_gemv_tasks.pack(codes, 5, "rows", out=out)
    with pytest.raises(ValueError, match=r"out has shape \(8, 6\), expected \(8, 8\)"):
        pack_gemv_tasks.pack(codes, 4, "rows", out=out)
    blocks = placed(random_blocks(BY_NAME["Q4_K"], 2))
    y, x = room((9, 2), np.float16), inputs(9, 256)
    with pytest.raises(ValueError, match="x has 9 vectors, expected 1 to 8"):
        pack_gemv_tasks.gemv_q4_k(blocks, 256, x, out=y, room=lambda n: room((n,), np.float32))
    quant = random_quant(4, (8, 64), 16)
    packed = gptq.pack("m", quant, Options("v2"))
    tensors = [placed(packed[f"m.{name}"]) for name in ("qweight", "qzeros", "scales")]
    with pytest.raises(ValueError, match="group_size is 16, expected -1 or a multiple of 32"):
        options: dict[str, Any] = {"version": 2, "out": room((1, 8), np.float16), "room": room}
        pack_gemv_tasks.gemv_gptq(*tensors, 16, inputs(1, 64), **options)


@pytest.mark.parametrize(
    ("shape", "words", "blocks"),
    [
        ((4096, 4096), 8, 4), ((1024, 4096), 8, 4), ((6144, 4096), 5, 2), ((28672, 4096), 1, 1),
        ((4096, 14336), 8, 4), ((8192, 8192), 4, 2), ((1024, 8192), 16, 8), ((28672, 8192), 1, 1),
        ((57344, 8192), 1, 1), ((8192, 28672), 4, 2), ((8, 128), 1, 1),
    ],
)  # fmt: skip
def test_blocks_that_share_rows(shape: tuple[int, int], words: int, blocks: int) -> None:
    """As many as are fastest on an H100, or nearly (see `splits_of`)."""
    for layout, columns, wanted in (("columns", 128, words), ("q4_k", 256, blocks)):
        rows, parts, _, _ = pack_gemv_tasks._BLOCKS[layout]
        slots, runs = pack_gemv_tasks.slots_of(layout, None), -(-shape[1] // columns)
        assert pack_gemv_tasks.splits_of(-(-shape[0] // rows), runs, parts, slots) == wanted


@pytest.mark.parametrize(
    ("processors", "capability", "words", "blocks"),
    [(132, (9, 0), 264, 528), (108, (8, 0), 216, 324), (40, (7, 5), 80, 160)],
)
def test_as_many_blocks_as_a_gpu_holds(
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    capability: tuple[int, int],
    words: int,
    blocks: int,
) -> None:
    found = SimpleNamespace(
        multi_processor_count=processors, major=capability[0], minor=capability[1]
    )
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: found)
    monkeypatch.setattr(pack_gemv_tasks, "_gpu", pack_gemv_tasks._gpu.__wrapped__)
    x = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    assert [pack_gemv_tasks.slots_of(name, x) for name in pack_gemv_tasks._BLOCKS] == [
        words,
        words,
        blocks,
    ]
