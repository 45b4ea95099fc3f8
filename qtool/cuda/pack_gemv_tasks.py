"""Tasks that pack codes into words, and that multiply packed weights by a few vectors.

pack    codes uint8 [out, in] -> words, in the layouts across (AWQ), columns and rows (GPTQ)
gemv    y = x W' for x float16 [batch, in], batch 1 to 8, y float16 [batch, out]: one task, or two
        where blocks share rows and `done` is not given: one that leaves partial sums, one that adds

`done` is int32, at least as many zeros as `counters` says, and zeros again when a task is done: of
tasks that may run at the same time, each needs its own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from qtool.cuda.arrays import describe
from qtool.cuda.tasks import (
    _WORDS,
    ACROSS,
    ALONG_ROWS,
    Task,
    _codes,
    _groups,
    _place,
    _scales,
    _zeros,
    ceil,
)
from qtool.gguf_types import BY_NAME

_PACKED = {"across": (4,), "columns": (2, 3, 4, 8), "rows": (2, 3, 4, 8)}
MOST = 8  # vectors
RUN = 32  # columns that groups are multiples of
_Q4_K = BY_NAME["Q4_K"]
# Rows of a block of threads, parts of it that each take runs of columns, its threads, and how many
# such blocks an SM holds at once: kernels/cuda/gemv.h.
_BLOCKS = {"across": (128, 4, 256, 2), "columns": (128, 4, 256, 2), "q4_k": (32, 4, 128, 4)}
_FEWER = {("q4_k", (8, 0)): 3}  # by capability: an A100 has less shared memory than a Hopper GPU
_HOPPER = 132, (9, 0)  # SMs of an H100 or H200, and their capability


def pack(codes: Any, bits: int, layout: str, *, out: Any) -> Task:
    """Words of codes [out, in]; of a code that does not fit, the low bits are taken."""
    from qtool.native.packing import words_shape

    if bits not in _PACKED.get(layout, ()):
        known = [f"{name} {n}" for name, widths in _PACKED.items() for n in widths]
        raise ValueError(f"layout {layout} with {bits} bits, expected {', '.join(known)}")
    found = describe("codes", codes, ("uint8",), (None, None))
    rows, cols = found.shape
    wanted = words_shape((rows, cols), bits, layout)
    words = describe("out", out, _WORDS, wanted)
    fields = _place("codes", found) | _place("values", words)
    fields |= {"rows": rows, "cols": cols, "pitch": wanted[1], "bits": bits}
    return Task(f"pack_{layout}_{bits}", (ceil(rows, 64), ceil(cols, 64)), fields)


@cache
def splits_of(blocks: int, runs: int, parts: int, slots: int) -> int:
    """How many blocks share a row: with which those that `slots` hold at once have the fewest runs
    to do one after the other, where what it begins and ends with counts as half a run, and what a
    block leaves the others as another half; of several such, the most. On an H100 the fastest, or
    within 3 % of it, of Llama's shapes (tests/gpu/gemv.py)."""

    def halves(splits: int) -> tuple[int, int]:
        work = 2 * ceil(runs, parts * splits) + 1 + (splits > 1)
        return ceil(blocks * splits, slots) * work, -splits

    return min(range(1, max(1, runs // parts) + 1), key=halves)


@cache
def _gpu(index: int) -> tuple[int, tuple[int, int]]:
    import torch

    found = torch.cuda.get_device_properties(index)
    return int(found.multi_processor_count), (int(found.major), int(found.minor))


def slots_of(layout: str, x: Any) -> int:
    """How many blocks of threads the GPU where `x` lies holds at once; an H100 or H200, where it
    lies on none."""
    on_gpu = getattr(x, "is_cuda", False)
    processors, capability = _gpu(x.get_device()) if on_gpu else _HOPPER
    return processors * _FEWER.get((layout, capability), _BLOCKS[layout][3])


def counters(out_features: int) -> int:
    """How many numbers `done` has at least."""
    return ceil(out_features, min(block[0] for block in _BLOCKS.values()))


def _inputs(x: Any, in_features: int) -> dict[str, int]:
    inputs = describe("x", x, ("float16",), (None, in_features))
    if not 1 <= inputs.shape[0] <= MOST:
        raise ValueError(f"x has {inputs.shape[0]} vectors, expected 1 to {MOST}")
    return {**_place("inputs", inputs), "batch": inputs.shape[0]}


def _products(
    layout: str,
    runs: int,
    x: Any,
    fields: dict[str, int],
    out: Any,
    room: Callable[[int], Any],
    done: Any,
) -> tuple[Task, ...]:
    """The task that multiplies; partial sums lie in `room(numbers)`, float32."""
    rows, batch = fields["rows"], fields["batch"]
    down, parts, threads, _ = _BLOCKS[layout]
    blocks = ceil(rows, down)
    splits = splits_of(blocks, runs, parts, slots_of(layout, x))
    name = "gemv_q4_k" if layout == "q4_k" else f"gemv_{layout}_4"
    values = describe("out", out, ("float16",), (batch, rows))
    grid, fields = (blocks, splits), {**fields, "splits": splits}
    if splits == 1:
        return (Task(name, grid, {**fields, **_place("values", values)}, threads, waits=True),)
    sums = describe("room", room(splits * batch * rows), ("float32",), (splits * batch * rows,))
    if done is not None:
        counts = describe("done", done, ("int32",), (None,))
        if counts.shape[0] < blocks:
            raise ValueError(f"done has {counts.shape[0]} numbers, expected at least {blocks}")
        fields |= _place("values", values) | _place("sums", sums) | _place("done", counts)
        return (Task(name, grid, fields, threads, waits=True),)
    add = {"rows": rows, "batch": batch, "splits": splits}
    add |= _place("codes", sums) | _place("values", values)
    first = Task(name, grid, {**fields, **_place("values", sums)}, threads, waits=True)
    return first, Task("gemv_sum", (ceil(batch * rows, 256), 1), add, waits=True)


def _of_words(
    layout: str,
    qweight: Any,
    shape: tuple[int, int],
    qzeros: Any,
    scales: Any,
    group_size: int,
    plus: int,
    x: Any,
    out: Any,
    room: Callable[[int], Any],
    done: Any,
) -> tuple[Task, ...]:
    rows, cols = shape
    if rows % 8 or cols % RUN:
        raise ValueError(f"a matrix of shape {shape}, expected multiples of 8 rows, {RUN} columns")
    size = cols if group_size == -1 else group_size
    if size < 1 or size % RUN:
        raise ValueError(f"group_size is {group_size}, expected -1 or a multiple of {RUN}")
    groups = ceil(cols, size)
    describe("scales", scales, ("float16",), (groups, rows))
    zeros = describe("qzeros", qzeros, _WORDS, (groups, rows // 8))
    kind = ACROSS if layout == "across" else ALONG_ROWS
    fields = _inputs(x, cols)
    fields |= _codes(qweight, shape, 4, layout)[1] | {"rows": rows, "cols": cols}
    fields |= _scales(scales, rows, groups, by_group=True) | _groups(cols, size)
    fields |= _zeros(zeros, kind, 1, rows // 8, 4, plus)
    together = RUN if size % (4 * RUN) else 4 * RUN  # columns that a part takes
    return _products(layout, ceil(cols, together), x, fields, out, room, done)


def gemv_awq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    group_size: int,
    x: Any,
    *,
    out: Any,
    room: Callable[[int], Any],
    done: Any = None,
) -> tuple[Task, ...]:
    """AWQ GEMM's tensors, scales float16."""
    shape = (int(qweight.shape[1]) * 8, int(qweight.shape[0]))
    given = (qzeros, scales, group_size, 0, x, out, room, done)
    return _of_words("across", qweight, shape, *given)


def gemv_gptq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    group_size: int,
    x: Any,
    *,
    version: int,
    out: Any,
    room: Callable[[int], Any],
    done: Any = None,
) -> tuple[Task, ...]:
    """GPTQ's tensors of 4 bits without g_idx, scales float16. version: as for `tasks.gptq`."""
    if version not in (1, 2):
        raise ValueError(f"version is {version}, expected 1 or 2")
    shape = (int(qweight.shape[1]), int(qweight.shape[0]) * 8)
    given = (qzeros, scales, group_size, int(version == 1), x, out, room, done)
    return _of_words("columns", qweight, shape, *given)


def gemv_q4_k(
    blocks: Any, in_features: int, x: Any, *, out: Any, room: Callable[[int], Any], done: Any = None
) -> tuple[Task, ...]:
    """Rows of Q4_K, uint8 [out, bytes of a row]."""
    pitch = _Q4_K.row_bytes(in_features)
    found = describe("blocks", blocks, ("uint8",), (None, pitch))
    fields = {**_inputs(x, in_features), **_place("codes", found)}
    fields |= {"pitch": pitch, "rows": found.shape[0], "cols": in_features}
    return _products("q4_k", in_features // _Q4_K.weights, x, fields, out, room, done)
