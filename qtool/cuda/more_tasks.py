"""Tasks that pack codes into words, and that multiply packed weights by a few vectors.

pack    codes uint8 [out, in] -> words, in the layouts across (AWQ), columns and rows (GPTQ)
gemv    y = x W' for x float16 [batch, in], batch 1 to 8, y float16 [batch, out]: two tasks, one
        that leaves partial sums and one that adds them
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


def splits_of(rows_of_blocks: int, runs: int, parts: int, wanted: int = 512) -> int:
    """How many blocks share a row: enough for `wanted` blocks in all, each with a run to do."""
    return max(1, min(ceil(wanted, rows_of_blocks), runs // parts))


def _batch(x: Any, in_features: int) -> tuple[int, dict[str, int]]:
    """The size of kernel for them, and fields."""
    inputs = describe("x", x, ("float16",), (None, in_features))
    batch = inputs.shape[0]
    if not 1 <= batch <= MOST:
        raise ValueError(f"x has {batch} vectors, expected 1 to {MOST}")
    room = next(n for n in (1, 2, 4, 8) if n >= batch)
    return room, {**_place("inputs", inputs), "batch": batch}


def _two(
    name: str,
    blocks: int,
    splits: int,
    fields: dict[str, int],
    out: Any,
    room: Callable[[int], Any],
) -> tuple[Task, Task]:
    """The task that leaves partial sums in `room(numbers)`, float32, and the one that adds them."""
    rows, batch = fields["rows"], fields["batch"]
    values = describe("out", out, ("float16",), (batch, rows))
    sums = describe("room", room(splits * batch * rows), ("float32",), (splits * batch * rows,))
    first = Task(
        name, (blocks, splits), {**fields, "splits": splits, **_place("values", sums)}, 128
    )
    add = {"rows": rows, "batch": batch, "splits": splits}
    add |= _place("codes", sums) | _place("values", values)
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
) -> tuple[Task, Task]:
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
    blocks = ceil(rows, 256 if layout == "across" else 128)
    splits = splits_of(blocks, cols // RUN, 4)
    return _two(f"gemv_{layout}_4_{most}", blocks, splits, fields, out, room)


def gemv_awq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    group_size: int,
    x: Any,
    *,
    out: Any,
    room: Callable[[int], Any],
) -> tuple[Task, Task]:
    """AWQ GEMM's tensors, scales float16."""
    shape = (int(qweight.shape[1]) * 8, int(qweight.shape[0]))
    given = (qzeros, scales, group_size, 0, x, out, room)
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
) -> tuple[Task, Task]:
    """GPTQ's tensors of 4 bits without g_idx, scales float16. version: as for `tasks.gptq`."""
    if version not in (1, 2):
        raise ValueError(f"version is {version}, expected 1 or 2")
    shape = (int(qweight.shape[1]), int(qweight.shape[0]) * 8)
    given = (qzeros, scales, group_size, int(version == 1), x, out, room)
    return _of_words("columns", qweight, shape, *given)


def gemv_q4_k(
    blocks: Any, in_features: int, x: Any, *, out: Any, room: Callable[[int], Any]
) -> tuple[Task, Task]:
    """Rows of Q4_K, uint8 [out, bytes of a row]."""
    pitch = _Q4_K.row_bytes(in_features)
    found = describe("blocks", blocks, ("uint8",), (None, pitch))
    rows = found.shape[0]
    most, fields = _batch(x, in_features)
    fields |= _place("codes", found)
    fields |= {"pitch": pitch, "rows": rows, "cols": in_features}
    down = ceil(rows, 4)
    splits = splits_of(down, in_features // _Q4_K.weights, 1)
    return _two(f"gemv_q4_k_{most}", down, splits, fields, out, room)
