"""CUDA kernels that pack and that multiply, on the host: exact words, and sums against float64."""

import dataclasses
from collections.abc import Callable
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
from qtool.scheme import GroupQuant

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


Tasks = Callable[[Any, Any, Any], Any]


def results(emulator: Emulator, tasks: Tasks, x: NDArray[np.float16], rows: int) -> list[Any]:
    """What `tasks(out, room, done)` give: sums in float32, where blocks share rows, and the result;
    by one task, where blocks count themselves, the same bits, and in any order of threads."""
    sums: list[NDArray[np.float32]] = []

    def keep(count: int) -> NDArray[np.float32]:
        sums.append(room((count,), np.float32))
        return sums[-1]

    out = room((len(x), rows), np.float16)
    first, *second = tasks(out, keep, None)
    made = sums[0] if second else out
    before = emulator.run(first, made).copy()
    define.same(emulator.run(first, made, order=1), before)
    if not second:
        return [out]
    emulator.run(second[0], out)
    done = placed(np.zeros(more_tasks.counters(rows), np.int32))
    alone = room(out.shape, np.float16)
    (task,) = tasks(alone, keep, done)
    for order in (0, 1):
        define.same(emulator.run(task, alone, order), out)
        assert not done.any()
    return [sums[0].reshape(-1, len(x), rows).sum(0, dtype=np.float64), out]


def product(
    emulator: Emulator,
    tasks: Tasks,
    x: NDArray[np.float16],
    exact: NDArray[np.float64],
    terms: NDArray[np.float64],
    floor: float = 0.0,
) -> None:
    """Against float64: no number further from it than tensor cores may be (see `most`), where
    products are at most terms [out, in] times x; all of them as near as sums in float32."""
    want = x.astype(np.float64) @ exact.T
    found = results(emulator, tasks, x, len(exact))
    bound = most(emulator) * (np.abs(x.astype(np.float64)) @ np.maximum(terms, floor).T)
    half = np.maximum(np.abs(want) + bound, 2.0**-14) * 2.0**-11
    assert (np.abs(found[-1].astype(np.float64) - want) <= bound + half).all()
    if len(found) > 1:
        assert (np.abs(found[0] - want) <= bound).all()
        assert np.abs(found[0] - want).mean() < 2e-6 * np.abs(want).mean()
    single = (x.astype(np.float32) @ exact.astype(np.float32).T).astype(np.float16)
    rounded = np.abs(single.astype(np.float64) - want).mean()
    assert np.abs(found[-1].astype(np.float64) - want).mean() <= 1.02 * rounded


def most(emulator: Emulator) -> float:
    """How far a sum may be from the exact one, of the sum of its terms' sizes.

    A tensor core sums at most 256 columns (a block, or a group in pieces of 128), so many at once.
    Each term, and the sum so far, loses less than 2^-fraction of the largest, and what is stored
    2^-23. Then it is scaled and summed in float32, where it loses 2^-24 at a time: in at most 60
    units, parts and splits here.
    """
    fraction, columns = emulator.core
    steps = 256 // columns
    return steps * ((columns + 1) * 2.0**-fraction + 2.0**-23) + 60 * 2.0**-24


def inputs(batch: int, columns: int, heavy: bool = False) -> NDArray[np.float16]:
    """Of a normal distribution; heavy: some of them a thousand times as large."""
    random = np.random.default_rng(batch)
    x = random.standard_normal((batch, columns))
    if heavy:
        x *= np.where(random.random((batch, columns)) < 0.01, 1000, 1)
    return placed(x.astype(np.float16))


def small_integers(batch: int, columns: int) -> NDArray[np.float16]:
    """Of which no sum of products with codes needs more bits than there are."""
    random = np.random.default_rng(batch)
    return placed(random.integers(-4, 5, (batch, columns)).astype(np.float16))


def awq_tasks(quant: GroupQuant, x: Any) -> Tasks:
    packed = awq.pack("m", quant, Options("gemm"))
    tensors = [placed(packed[f"m.{name}"]) for name in ("qweight", "qzeros", "scales")]
    size = quant.scheme.group_size
    return lambda out, keep, done: more_tasks.gemv_awq(
        *tensors, size, x, out=out, room=keep, done=done
    )


def gptq_tasks(quant: GroupQuant, x: Any, version: int) -> Tasks:
    packed = gptq.pack("m", quant, Options(f"v{version}"))
    tensors = [placed(packed[f"m.{name}"]) for name in ("qweight", "qzeros", "scales")]
    size = quant.scheme.group_size
    return lambda out, keep, done: more_tasks.gemv_gptq(
        *tensors, size, x, version=version, out=out, room=keep, done=done
    )


def q4_k_tasks(blocks: Any, columns: int, x: Any) -> Tasks:
    return lambda out, keep, done: more_tasks.gemv_q4_k(
        blocks, columns, x, out=out, room=keep, done=done
    )


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


def parts_of_q4_k(blocks: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """d * sc * q and dmin * m of each weight, exactly, and 256 of the largest d and dmin: what is
    less than that is aligned as if it were not."""
    codes = blocks.reshape(-1, 144).astype(np.int64)
    d, least = blocks.reshape(-1, 144)[:, :4].copy().view(np.float16).astype(np.float64).T
    low, high, both = codes[:, 4:8], codes[:, 8:12], codes[:, 12:16]
    scale = np.hstack([low & 63, both & 15 | low >> 6 << 4])
    minimum = np.hstack([high & 63, both >> 4 | high >> 6 << 4])
    runs = codes[:, 16:].reshape(-1, 4, 1, 32)
    q = np.concatenate([runs & 15, runs >> 4], 2).reshape(-1, 8, 32)
    product = (d[:, None] * scale)[..., None] * q
    less = np.broadcast_to((least[:, None] * minimum)[..., None], product.shape)
    floor = 256 * float(d.max() + least.max())
    return product.reshape(len(blocks), -1), less.reshape(len(blocks), -1), floor


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
        rows, parts, _, slots = more_tasks._BLOCKS[layout]
        runs = -(-shape[1] // columns)
        assert more_tasks.splits_of(-(-shape[0] // rows), runs, parts, slots) == wanted
