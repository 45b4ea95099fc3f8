"""Products of packed matrices with vectors, as tasks of qtool.cuda."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.cuda import pack_gemv_tasks
from qtool.formats import awq, gptq
from qtool.formats.facts import Options
from qtool.gguf_types import BY_NAME
from qtool.scheme import GroupQuant
from support.cuda.cuda_emulation import Emulator, placed, room
from support.kernels import packed_definitions as define
from support.kernels.random_matrices import random_quant

Tasks = Callable[[Any, Any, Any], Any]
Of = tuple[Any, Callable[[Any], Tasks], Any, float]


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
    done = placed(np.zeros(pack_gemv_tasks.counters(rows), np.int32))
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
    return lambda out, keep, done: pack_gemv_tasks.gemv_awq(
        *tensors, size, x, out=out, room=keep, done=done
    )


def gptq_tasks(quant: GroupQuant, x: Any, version: int) -> Tasks:
    packed = gptq.pack("m", quant, Options(f"v{version}"))
    tensors = [placed(packed[f"m.{name}"]) for name in ("qweight", "qzeros", "scales")]
    size = quant.scheme.group_size
    return lambda out, keep, done: pack_gemv_tasks.gemv_gptq(
        *tensors, size, x, version=version, out=out, room=keep, done=done
    )


def q4_k_tasks(blocks: Any, columns: int, x: Any) -> Tasks:
    return lambda out, keep, done: pack_gemv_tasks.gemv_q4_k(
        blocks, columns, x, out=out, room=keep, done=done
    )


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


def of_layout(layout: str, shape: tuple[int, int]) -> Of:
    """Of a matrix: its exact numbers, the tasks of an input, and the sizes of its terms."""
    if layout == "q4_k":
        weight = np.random.default_rng(1).standard_normal(shape, np.float32)
        blocks = placed(native_gguf.encode(weight, BY_NAME["Q4_K"]))
        positive, less, floor = parts_of_q4_k(blocks)
        return (
            positive - less,
            lambda x: q4_k_tasks(blocks, shape[1], x),
            positive + less,
            floor,
        )
    quant = random_quant(4, shape, 128)
    exact = quant.dequantize().astype(np.float64)
    if layout == "across":
        return exact, lambda x: awq_tasks(quant, x), np.abs(exact), 0.0
    return exact, lambda x: gptq_tasks(quant, x, 2), np.abs(exact), 0.0
