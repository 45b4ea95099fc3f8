"""What `qtool bench --device cuda` times: tasks on arrays of random numbers, and their bytes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qtool import native_gguf
from qtool.cuda import (
    encode_tasks,
    float_tasks,
    pack_gemv_tasks,
    quantize_tasks,
    round_tasks,
    tasks,
)
from qtool.cuda.tasks import Task, ceil
from qtool.gguf.gptq.levels import levels
from qtool.gguf_types import BY_NAME, BlockType
from qtool.native.packing import words_shape

GROUP = 128
# Of Llama 8B and 70B, [out, in]; and what engines make one matrix of: q, k and v, gate and up.
LLAMA = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
LLAMA += [(8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)]
TOGETHER = [(6144, 4096), (28672, 4096), (10240, 8192), (57344, 8192)]


@dataclass(frozen=True)
class Arrays:
    """How a case gets its arrays, by shape and dtype: random bits, ones, room to write, weights;
    and a copy of an array of numpy."""

    random: Callable[[tuple[int, ...], str], Any]
    ones: Callable[[tuple[int, ...], str], Any]
    empty: Callable[[tuple[int, ...], str], Any]
    normal: Callable[[tuple[int, ...], str], Any]
    copy: Callable[[Any], Any]


@dataclass(frozen=True)
class Work:
    """Tasks that are timed together, the arrays they use, and the bytes they must move."""

    tasks: tuple[Task, ...]
    arrays: tuple[Any, ...]
    nbytes: int
    encoded: int = 0  # weights


@dataclass(frozen=True)
class Case:
    name: str
    prepare: Callable[[Arrays, int, int], Work]  # of a matrix [out, in]
    shape: tuple[int, int] = (8192, 8192)


def _work(task: Task, *arrays: Any) -> Work:
    return Work((task,), arrays, sum(int(array.nbytes) for array in arrays))


def _gguf(block: BlockType, dtype: str) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        blocks = arrays.random((rows, block.row_bytes(cols)), "uint8")
        out = arrays.empty((rows, cols), dtype)
        return _work(float_tasks.gguf(blocks, block, cols, out=out), blocks, out)

    return Case(f"dequantize gguf-{block.name} {dtype}", prepare)


def _gptq(bits: int, dtype: str, ordered: bool = False) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        groups = ceil(cols, GROUP)
        words = arrays.random(words_shape((rows, cols), bits, "columns"), "int32")
        zeros = arrays.random((groups, ceil(rows * bits, 32)), "int32")
        scales = arrays.ones((groups, rows), "float16")
        out = arrays.empty((rows, cols), dtype)
        order = (arrays.ones((cols,), "int32"),) if ordered else ()
        task = tasks.gptq(
            words, zeros, scales, bits, GROUP, version=1, out=out, g_idx=order[0] if order else None
        )
        return _work(task, words, zeros, scales, out, *order)

    return Case(f"dequantize gptq {bits} bits{' g_idx' if ordered else ''} {dtype}", prepare)


def _awq(dtype: str) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        groups = ceil(cols, GROUP)
        words = arrays.random((cols, rows // 8), "int32")
        zeros = arrays.random((groups, rows // 8), "int32")
        scales = arrays.ones((groups, rows), "float16")
        out = arrays.empty((rows, cols), dtype)
        task = tasks.awq_gemm(words, zeros, scales, GROUP, out=out)
        return _work(task, words, zeros, scales, out)

    return Case(f"dequantize awq gemm {dtype}", prepare)


def _packed(bits: int, dtype: str) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        words = arrays.random(words_shape((rows, cols), bits, "rows"), "int32")
        scale = arrays.ones((rows, ceil(cols, GROUP)), "float16")
        out = arrays.empty((rows, cols), dtype)
        task = tasks.pack_quantized(words, scale, (rows, cols), bits, GROUP, out=out)
        return _work(task, words, scale, out)

    return Case(f"dequantize pack-quantized {bits} bits {dtype}", prepare)


def _bytes(kind: str, block: tuple[int, int], name: str, dtype: str) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        codes = arrays.random((rows, cols), "int8" if kind == "int8" else "uint8")
        shape = (ceil(rows, block[0]), 1 if block[1] == -1 else ceil(cols, block[1]))
        scale, out = arrays.ones(shape, "float32"), arrays.empty((rows, cols), dtype)
        task = float_tasks.bytes_(codes, kind, scale=scale, block=block, out=out)
        return _work(task, codes, scale, out)

    return Case(f"dequantize {name} {dtype}", prepare)


def _fp4(name: str, kind: str, group: int, dtype: str) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        codes = arrays.random((rows, cols // 2), "uint8")
        scale = arrays.random((rows, cols // group), "uint8")
        out = arrays.empty((rows, cols), dtype)
        return _work(float_tasks.fp4(codes, scale, kind, out=out), codes, scale, out)

    return Case(f"dequantize {name} {dtype}", prepare)


def _gemv(kind: str, batch: int, shape: tuple[int, int]) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        x, out = arrays.ones((batch, cols), "float16"), arrays.empty((batch, rows), "float16")
        kept: list[Any] = []

        def room(count: int) -> Any:
            kept.append(arrays.empty((count,), "float32"))
            return kept[-1]

        kept.append(arrays.copy(np.zeros(pack_gemv_tasks.counters(rows), np.int32)))
        given: dict[str, Any] = {"out": out, "room": room, "done": kept[0]}
        if kind == "q4_k":
            stored = [arrays.random((rows, BY_NAME["Q4_K"].row_bytes(cols)), "uint8")]
            found = pack_gemv_tasks.gemv_q4_k(stored[0], cols, x, **given)
        else:
            groups = ceil(cols, GROUP)
            shape = (cols, rows // 8) if kind == "awq" else (cols // 8, rows)
            stored = [
                arrays.random(shape, "int32"),
                arrays.random((groups, rows // 8), "int32"),
                arrays.ones((groups, rows), "float16"),
            ]
            words, zeros, scales = stored
            if kind == "awq":
                found = pack_gemv_tasks.gemv_awq(words, zeros, scales, GROUP, x, **given)
            else:
                given["version"] = 1
                found = pack_gemv_tasks.gemv_gptq(words, zeros, scales, GROUP, x, **given)
        moved = sum(int(array.nbytes) for array in (*stored, x, out))
        return Work(found, (*stored, x, out, *kept), moved)

    return Case(f"gemv {kind} batch {batch} {shape[0]}x{shape[1]}", prepare, shape)


def _encode(block: BlockType, weighted: bool) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        weight = arrays.normal((rows, cols), "float16")
        out = arrays.empty((rows, block.row_bytes(cols)), "uint8")
        more: dict[str, Any] = {}
        if weighted:
            more["importance"] = arrays.ones((1, cols), "float32")
        if encode_tasks.needs_means(block, more.get("importance")):
            more["means"] = arrays.empty((rows,), "float32")
        kept = list(more.values())
        if encode_tasks.needs_lattice(block):
            more["lattice"] = [arrays.copy(array) for array in native_gguf.lattice(block)]
            kept += more["lattice"]
        found = encode_tasks.encode(weight, block, out=out, **more)
        moved = int(weight.nbytes) + int(out.nbytes)
        return Work(found, (weight, out, *kept), moved, rows * cols)

    return Case(f"encode gguf-{block.name} float16{' importance' if weighted else ''}", prepare)


def _rounded(bits: int, ratios: int) -> Case:
    """Codes of every weight by grids that are found first: by the full range, or by a search."""

    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        weight, grid = arrays.normal((cols, rows), "float32"), quantize_tasks.Grid(bits, False, 1.0)
        scales = arrays.empty((ceil(cols, GROUP), rows, 2), "float32")
        codes = arrays.empty((cols, rows), "uint8")
        more = [arrays.copy(np.linspace(1, 0.5, ratios, dtype=np.float32))] if ratios else []
        found = (
            quantize_tasks.find_groups(
                weight, grid, GROUP, out=scales, ratios=more[0] if more else None
            ),
            quantize_tasks.round_weights(weight, scales, bits, GROUP, out=codes),
        )
        moved = int(weight.nbytes) + int(codes.nbytes)
        return Work(found, (weight, scales, codes, *more), moved, rows * cols)

    how = f"best of {ratios} ranges" if ratios else "full range"
    return Case(f"quantize {bits} bits {how}", prepare)


def _to_floats(name: str, book: str, width: int, scale_dtype: str, steps: int = 0) -> Case:
    """Scales of max|w|, the best of these and `steps` beside them, and codes of every weight."""

    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        weight, size = arrays.normal((cols, rows), "float32"), width or cols
        tops, scales, best = (arrays.ones((ceil(cols, size), rows), "float32") for _ in range(3))
        codes = arrays.empty((cols, rows), "uint8")
        more = [arrays.copy(np.arange(1, steps + 1, dtype=np.int32))] if steps else []
        found = [round_tasks.scales_of(tops, book, scale_dtype, out=scales)]
        if steps:
            found.append(round_tasks.search(weight, scales, book, size, steps=more[0], out=best))
        used = best if steps else scales
        found.append(round_tasks.round_weights(weight, used, book, size, out=codes))
        moved = int(weight.nbytes) + int(codes.nbytes)
        arrays_used = (weight, tops, scales, best, codes, *more)
        return Work(tuple(found), arrays_used, moved, rows * cols)

    how = f" best of {steps + 1} scales" if steps else ""
    return Case(f"quantize {name}{how}", prepare)


def _swept(bits: int) -> Case:
    """A block of columns of GPTQ's sweep."""

    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        count = min(cols, quantize_tasks.MOST_IN_BLOCK)
        weight = arrays.normal((count, rows), "float32")
        factor = arrays.ones((count, quantize_tasks.padded(count)), "float32")
        scales, index = arrays.ones((1, rows, 2), "float32"), arrays.copy(np.zeros(count, np.int32))
        out = arrays.empty((2, count, rows), "float32")
        task = quantize_tasks.sweep_block(weight, factor, scales, index, bits, out=out)
        moved = int(weight.nbytes) + int(out.nbytes)
        return Work((task,), (weight, factor, scales, index, out), moved, rows * count)

    return Case(f"quantize {bits} bits sweep of a block", prepare)


def _swept_onto(block: BlockType) -> Case:
    """The same onto the levels of a type of GGUF."""

    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        count = min(cols, quantize_tasks.MOST_IN_BLOCK)
        weight = arrays.normal((count, rows), "float32")
        factor = arrays.ones((count, quantize_tasks.padded(count)), "float32")
        known = levels(np.zeros((1, block.row_bytes(256)), np.uint8), block, 256)
        index = arrays.copy(np.arange(count, dtype=np.int32) // np.int32(known.width))
        scales = arrays.ones((ceil(count, known.width), rows, 2), "float32")
        numbers, consecutive = quantize_tasks.in_order(known.book)
        book, out = arrays.copy(numbers), arrays.empty((2, count, rows), "float32")
        task = quantize_tasks.sweep_onto_levels(
            weight, factor, scales, index, book, consecutive, out=out
        )
        moved = int(weight.nbytes) + int(scales.nbytes) + int(out.nbytes)
        return Work((task,), (weight, factor, scales, index, book, out), moved, rows * count)

    return Case(f"quantize gguf-{block.name} sweep of a block", prepare)


def all_cases() -> Iterator[Case]:
    """Every kernel that is worth timing."""
    for dtype in ("float16", "bfloat16", "float32"):
        yield _awq(dtype)
        yield from (_gptq(bits, dtype) for bits in (2, 3, 4, 8))
        yield _gptq(4, dtype, ordered=True)
        yield from (_packed(bits, dtype) for bits in range(2, 9))
        yield _bytes("int8", (1, -1), "int8 channel", dtype)
        yield _bytes("float8_e4m3fn", (1, -1), "fp8 e4m3fn channel", dtype)
        yield _bytes("float8_e4m3fn", (128, 128), "fp8 e4m3fn 128x128", dtype)
        yield _bytes("float8_e5m2", (1, -1), "fp8 e5m2 channel", dtype)
        yield _fp4("mxfp4", "e8m0", 32, dtype)
        yield _fp4("nvfp4", "e4m3fn", 16, dtype)
        yield from (_gguf(block, dtype) for block in BY_NAME.values())
    larger = (_awq("float16"), _gptq(4, "float16"), _packed(4, "float16"))
    for case in (*larger, _gguf(BY_NAME["Q4_K"], "float16"), _fp4("mxfp4", "e8m0", 32, "float16")):
        yield replace(case, name=f"{case.name} 28672x8192", shape=(28672, 8192))
    for block in BY_NAME.values():
        plain = () if block.needs_importance else (False,)
        yield from (_encode(block, weighted) for weighted in (*plain, True))
    yield from (_rounded(4, 0), _rounded(4, 20), _swept(4))
    yield _to_floats("fp8 e4m3fn channel", "e4m3", 0, "float32")
    yield from (_to_floats("nvfp4", "e2m1", 16, "float8_e4m3", steps) for steps in (0, 11))
    yield from (_swept_onto(BY_NAME[name]) for name in ("Q4_K", "IQ4_XS"))
    for kind in ("awq", "gptq", "q4_k"):
        yield from (_gemv(kind, batch, shape) for batch in (1, 8) for shape in LLAMA)
        yield from (_gemv(kind, batch, (8192, 8192)) for batch in (2, 4))
        yield from (_gemv(kind, 1, shape) for shape in TOGETHER)
