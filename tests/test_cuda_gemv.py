"""CUDA kernels that pack and that multiply, on the host: exact words, and sums against float64."""

from typing import Any

import numpy as np
import packed_definitions as define
import pytest
from cuda_emulation import Emulator, emulator, placed, room
from numpy.typing import NDArray
from test_native_gguf_dequantize import random_blocks
from test_native_stored import random_quant

from qtool import native, native_gguf
from qtool.cuda import more_tasks
from qtool.formats import awq, gptq
from qtool.formats.facts import Options
from qtool.gguf_types import BY_NAME
from qtool.native.packing import words_shape

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
            task = more_tasks.pack(codes, bits, layout, out=out)
            found = emulator.run(task, out, order)
            np.testing.assert_array_equal(found, native.pack(codes, bits, layout), str(shape))


def product(
    emulator: Emulator, tasks: Any, x: NDArray[np.float16], rows: int, exact: NDArray[np.float32]
) -> None:
    """What `tasks(out, room, done)` give against float64, mean error over mean size; by one task
    where blocks count themselves, the same bits."""
    sums: list[NDArray[np.float32]] = []

    def keep(count: int) -> NDArray[np.float32]:
        sums.append(room((count,), np.float32))
        return sums[-1]

    out, want = room((len(x), rows), np.float16), x.astype(np.float64) @ exact.astype(np.float64).T
    first, *second = tasks(out, keep, None)
    made = sums[0] if second else out
    before = emulator.run(first, made).copy()
    define.same(emulator.run(first, made, order=1), before)
    if second:
        emulator.run(second[0], out)
        total = sums[0].reshape(-1, len(x), rows).astype(np.float64).sum(0)
        assert np.abs(total - want).mean() < 2e-6 * np.abs(want).mean()
        done, alone = (
            placed(np.zeros(more_tasks.counters(rows), np.int32)),
            room(out.shape, np.float16),
        )
        (task,) = tasks(alone, keep, done)
        for order in (0, 1):
            define.same(emulator.run(task, alone, order), out)
            assert not done.any()
    assert np.abs(out.astype(np.float64) - want).mean() < 5e-4 * np.abs(want).mean()


def inputs(batch: int, columns: int) -> NDArray[np.float16]:
    return placed(np.random.default_rng(batch).standard_normal((batch, columns)).astype(np.float16))


@pytest.mark.parametrize("batch", range(1, 9))
def test_awq_times_vectors(emulator: Emulator, batch: int) -> None:
    for shape, size in [((256, 512), 128), ((264, 96), 32), ((8, 1024), 128)]:
        quant = random_quant(4, shape, size)
        packed = awq.pack("m", quant, Options("gemm"))
        tensors = [placed(packed[f"m.{name}"]) for name in ("qweight", "qzeros", "scales")]
        x = inputs(batch, shape[1])

        def tasks(
            out: Any, keep: Any, done: Any, t: Any = tensors, x: Any = x, size: int = size
        ) -> Any:
            return more_tasks.gemv_awq(*t, size, x, out=out, room=keep, done=done)

        product(emulator, tasks, x, shape[0], quant.dequantize())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("batch", range(1, 9))
def test_gptq_times_vectors(emulator: Emulator, batch: int, version: int) -> None:
    for shape, size in [((128, 512), 128), ((264, 96), 32), ((8, 1024), -1)]:
        quant = random_quant(4, shape, size, symmetric=version == 1)
        packed = gptq.pack("m", quant, Options(f"v{version}"))
        tensors = [placed(packed[f"m.{name}"]) for name in ("qweight", "qzeros", "scales")]
        x = inputs(batch, shape[1])

        def tasks(
            out: Any, keep: Any, done: Any, t: Any = tensors, x: Any = x, size: int = size
        ) -> Any:
            options: dict[str, Any] = {"version": version, "out": out, "room": keep, "done": done}
            return more_tasks.gemv_gptq(*t, size, x, **options)

        product(emulator, tasks, x, shape[0], quant.dequantize())


@pytest.mark.parametrize("batch", range(1, 9))
def test_q4_k_times_vectors(emulator: Emulator, batch: int) -> None:
    q4_k = BY_NAME["Q4_K"]
    for rows, columns in [(5, 256), (64, 1024), (3, 4352)]:
        weight = np.random.default_rng(rows).standard_normal((rows, columns), np.float32)
        blocks = placed(native_gguf.encode(weight, q4_k))
        x = inputs(batch, columns)

        def tasks(
            out: Any, keep: Any, _: Any, b: Any = blocks, n: int = columns, x: Any = x
        ) -> Any:
            return more_tasks.gemv_q4_k(b, n, x, out=out, room=keep)

        product(emulator, tasks, x, rows, native_gguf.dequantize(blocks, q4_k, columns))


def test_every_one_of_them_is_compared(emulator: Emulator) -> None:
    made = {name for name in emulator.kernels() if name.startswith(("pack_", "gemv_"))}
    gemv = {f"gemv_{kind}_{n}" for kind in ("across_4", "columns_4", "q4_k") for n in (1, 2, 4, 8)}
    assert made == {f"pack_{layout}_{bits}" for layout, bits in WIDTHS} | gemv | {"gemv_sum"}


def test_refusals() -> None:
    codes, out = placed(np.zeros((8, 64), np.uint8)), room((8, 6), np.int32)
    with pytest.raises(ValueError, match="layout rows with 5 bits, expected across 4, columns 2"):
        more_tasks.pack(codes, 5, "rows", out=out)
    with pytest.raises(ValueError, match=r"out has shape \(8, 6\), expected \(8, 8\)"):
        more_tasks.pack(codes, 4, "rows", out=out)
    blocks = placed(random_blocks(BY_NAME["Q4_K"], 2))
    y, x = room((9, 2), np.float16), inputs(9, 256)
    with pytest.raises(ValueError, match="x has 9 vectors, expected 1 to 8"):
        more_tasks.gemv_q4_k(blocks, 256, x, out=y, room=lambda n: room((n,), np.float32))
    quant = random_quant(4, (8, 64), 16)
    packed = gptq.pack("m", quant, Options("v2"))
    tensors = [placed(packed[f"m.{name}"]) for name in ("qweight", "qzeros", "scales")]
    with pytest.raises(ValueError, match="group_size is 16, expected -1 or a multiple of 32"):
        options: dict[str, Any] = {"version": 2, "out": room((1, 8), np.float16), "room": room}
        more_tasks.gemv_gptq(*tensors, 16, inputs(1, 64), **options)
