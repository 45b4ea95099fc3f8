"""`qtool bench --device cuda`: GB/s of each kernel beside a device-to-device copy of this run.

A kernel's bytes are those it must read and write, each once. Its time is the median of runs
between two events; the copy, of a buffer larger than the caches, counts what it reads and writes.
Encoders compute more than they move: what counts there is seconds for 10^9 weights.
"""

import fnmatch
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from qtool import native_gguf
from qtool.cuda import encode_tasks, float_tasks, more_tasks, tasks
from qtool.cuda.tasks import Task, ceil
from qtool.errors import UnsupportedError
from qtool.gguf_types import BY_NAME, BlockType
from qtool.native.packing import words_shape

GROUP = 128


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
        return _work(float_tasks.bytes_(codes, kind, scale=scale, block=block, out=out), codes, out)

    return Case(f"dequantize {name} {dtype}", prepare)


def _fp4(name: str, kind: str, group: int, dtype: str) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        codes = arrays.random((rows, cols // 2), "uint8")
        scale = arrays.random((rows, cols // group), "uint8")
        out = arrays.empty((rows, cols), dtype)
        return _work(float_tasks.fp4(codes, scale, kind, out=out), codes, scale, out)

    return Case(f"dequantize {name} {dtype}", prepare)


def _gemv(kind: str, batch: int) -> Case:
    def prepare(arrays: Arrays, rows: int, cols: int) -> Work:
        x, out = arrays.ones((batch, cols), "float16"), arrays.empty((batch, rows), "float16")
        kept: list[Any] = []

        def room(count: int) -> Any:
            kept.append(arrays.empty((count,), "float32"))
            return kept[-1]

        if kind == "q4_k":
            stored = [arrays.random((rows, BY_NAME["Q4_K"].row_bytes(cols)), "uint8")]
            found = more_tasks.gemv_q4_k(stored[0], cols, x, out=out, room=room)
        else:
            groups = ceil(cols, GROUP)
            shape = (cols, rows // 8) if kind == "awq" else (cols // 8, rows)
            stored = [
                arrays.random(shape, "int32"),
                arrays.random((groups, rows // 8), "int32"),
                arrays.ones((groups, rows), "float16"),
            ]
            words, zeros, scales = stored
            given: dict[str, Any] = {"out": out, "room": room}
            if kind == "awq":
                found = more_tasks.gemv_awq(words, zeros, scales, GROUP, x, **given)
            else:
                given["version"] = 1
                found = more_tasks.gemv_gptq(words, zeros, scales, GROUP, x, **given)
        moved = sum(int(array.nbytes) for array in (*stored, x, out))
        return Work(found, (*stored, x, out, *kept), moved)

    return Case(f"gemv {kind} batch {batch}", prepare)


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


def _all() -> Iterator[Case]:
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
    for name in encode_tasks.ENCODED:
        plain = () if BY_NAME[name].needs_importance else (False,)
        yield from (_encode(BY_NAME[name], weighted) for weighted in (*plain, True))
    for kind in ("awq", "gptq", "q4_k"):
        yield from (_gemv(kind, batch) for batch in (1, 2, 4, 8))


def cases_named(pattern: str | None) -> list[Case]:
    """Cases whose name has the pattern in it, or matches it where it has * or ?."""
    cases = list(_all())
    if pattern is None:
        return cases
    wild = any(sign in pattern for sign in "*?[")
    wanted = pattern.lower() if wild else f"*{pattern.lower()}*"
    found = [case for case in cases if fnmatch.fnmatchcase(case.name.lower(), wanted)]
    if not found:
        raise UnsupportedError(
            f"no CUDA kernel matches {pattern!r}; names begin with dequantize awq, gptq, "
            "pack-quantized, int8, fp8, mxfp4, nvfp4 or gguf-, with encode gguf-, or with gemv"
        )
    return found


@dataclass(frozen=True)
class Result:
    """Bytes a second of a kernel, and of the copy in the same run."""

    name: str
    bytes_per_s: float
    copy_bytes_per_s: float
    encoded_per_s: float = 0.0  # weights, of an encoder

    @property
    def fraction(self) -> float:
        return self.bytes_per_s / self.copy_bytes_per_s

    @property
    def seconds_per_billion(self) -> float | None:
        """Of weights, to encode them."""
        return 1e9 / self.encoded_per_s if self.encoded_per_s else None

    def json(self) -> dict[str, object]:
        seconds = self.seconds_per_billion
        more = {} if seconds is None else {"seconds_per_1e9_weights": round(seconds, 4)}
        return {
            "kernel": self.name,
            "gb_per_s": round(self.bytes_per_s / 1e9, 1),
            "copy_gb_per_s": round(self.copy_bytes_per_s / 1e9, 1),
            "fraction": round(self.fraction, 4),
            **more,
        }


def _median_seconds(run: Callable[[], object], runs: int) -> float:
    """Of `runs` runs by events, after two that are not counted."""
    import torch

    event: Any = torch.cuda.Event
    times: list[float] = []
    for number in range(runs + 2):
        before, after = event(enable_timing=True), event(enable_timing=True)
        before.record()
        run()
        after.record()
        after.synchronize()
        if number >= 2:
            times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times)


def bench(cases: list[Case], rows: int = 8192, cols: int = 8192, runs: int = 20) -> list[Result]:
    """Times cases on torch's current GPU; a copy of 1 GiB is timed before each."""
    import torch

    from qtool.cuda.running import launch, require

    require()
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def random(shape: tuple[int, ...], dtype: str) -> Any:
        kind = getattr(torch, dtype)
        size = kind.itemsize
        for n in shape:
            size *= n
        found = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        return found.view(kind).reshape(shape)

    arrays = Arrays(
        random,
        lambda shape, dtype: torch.ones(shape, dtype=getattr(torch, dtype), device="cuda"),
        lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda"),
        lambda shape, dtype: torch.randn(shape, dtype=getattr(torch, dtype), device="cuda"),
        lambda array: torch.from_numpy(array).cuda(),
    )
    results = []
    for case in cases:
        work = case.prepare(arrays, rows, cols)
        copied = 2 * source.nbytes / _median_seconds(partial(target.copy_, source), runs)
        seconds = _median_seconds(partial(launch, *work.tasks), runs)
        made = Result(case.name, work.nbytes / seconds, copied, work.encoded / seconds)
        results.append(made)
    return results
