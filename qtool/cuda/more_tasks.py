"""Tasks that pack codes into words, and that multiply packed weights by a few vectors.

pack    codes uint8 [out, in] -> words, in the layouts across (AWQ), columns and rows (GPTQ)
gemv    y = x W' for x float16 [batch, in], batch 1 to 8, y float16 [batch, out]: one task, or two
        where blocks share rows and `done` is not given: one that leaves partial sums, one that adds

`done` is int32, at least as many zeros as `counters` says, and zeros again when a task is done: of
tasks that may run at the same time, each needs its own.
"""

from collections.abc import Callable
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
RUN = 32  # columns that a thread goes through at a time
_Q4_K = BY_NAME["Q4_K"]
# Rows of a block of threads, and parts of it that each take runs: kernels/cuda/gemv.h.
_BLOCKS = {"across": (128, 8), "columns": (32, 16)}
_Q4_K_ROWS = {1: 8, 2: 4, 4: 4, 8: 2}  # by the size of kernel


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


def splits_of(blocks: int, runs: int, parts: int, wanted: int = 400) -> int:
    """How many blocks share a row: enough for `wanted` blocks in all, whose parts all have a run to
    do; a number that gives all of them as many, where one is found up to twice as large."""
    most = max(1, runs // parts)
    least = min(ceil(wanted, blocks), most)
    even = (n for n in range(least, min(2 * least, most) + 1) if runs % (parts * n) == 0)
    return next(even, least)


def counters(out_features: int) -> int:
    """How many numbers `done` has at least."""
    return ceil(out_features, min(down for down, _ in _BLOCKS.values()))


def _batch(x: Any, in_features: int) -> tuple[int, dict[str, int]]:
    """The size of kernel for them, and fields."""
    inputs = describe("x", x, ("float16",), (None, in_features))
    batch = inputs.shape[0]
    if not 1 <= batch <= MOST:
        raise ValueError(f"x has {batch} vectors, expected 1 to {MOST}")
    room = next(n for n in (1, 2, 4, 8) if n >= batch)
    return room, {**_place("inputs", inputs), "batch": batch}


def _products(
    name: str,
    blocks: int,
    splits: int,
    fields: dict[str, int],
    out: Any,
    room: Callable[[int], Any],
    done: Any,
) -> tuple[Task, ...]:
    """The task that multiplies; partial sums lie in `room(numbers)`, float32."""
    rows, batch = fields["rows"], fields["batch"]
    values = describe("out", out, ("float16",), (batch, rows))
    grid, fields = (blocks, splits), {**fields, "splits": splits}
    if splits == 1:
        return (Task(name, grid, {**fields, **_place("values", values)}, 128),)
    sums = describe("room", room(splits * batch * rows), ("float32",), (splits * batch * rows,))
    if done is not None:
        counts = describe("done", done, ("int32",), (None,))
        if counts.shape[0] < blocks:
            raise ValueError(f"done has {counts.shape[0]} numbers, expected at least {blocks}")
        fields |= _place("values", values) | _place("sums", sums) | _place("done", counts)
        return (Task(name, grid, fields, 128),)
    add = {"rows": rows, "batch": batch, "splits": splits}
    add |= _place("codes", sums) | _place("values", values)
    first = Task(name, grid, {**fields, **_place("values", sums)}, 128)
    return first, Task("gemv_sum", (ceil(batch * rows, 256), 1), add)


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
    most, fields = _batch(x, cols)
    fields |= _codes(qweight, shape, 4, layout)[1] | {"rows": rows, "cols": cols}
    fields |= _scales(scales, rows, groups, by_group=True) | _groups(cols, size)
    fields |= _zeros(zeros, kind, 1, rows // 8, 4, plus)
    down, parts = _BLOCKS[layout]
    blocks = ceil(rows, down)
    splits = splits_of(blocks, cols // RUN, parts)
    return _products(f"gemv_{layout}_4_{most}", blocks, splits, fields, out, room, done)


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
    blocks: Any, in_features: int, x: Any, *, out: Any, room: Callable[[int], Any]
) -> tuple[Task, ...]:
    """Rows of Q4_K, uint8 [out, bytes of a row]. Blocks share no rows: `room` is not asked for."""
    pitch = _Q4_K.row_bytes(in_features)
    found = describe("blocks", blocks, ("uint8",), (None, pitch))
    rows = found.shape[0]
    most, fields = _batch(x, in_features)
    fields |= _place("codes", found)
    fields |= {"pitch": pitch, "rows": rows, "cols": in_features}
    down = ceil(rows, _Q4_K_ROWS[most])
    return _products(f"gemv_q4_k_{most}", down, 1, fields, out, room, None)
