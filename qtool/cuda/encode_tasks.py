"""Tasks that encode weights as blocks of GGUF, byte for byte as the CPU does, and that tell what
was lost.

    weight [rows, in]  float32, float16 or bfloat16 -> blocks uint8 [rows, bytes of a row]
    squares of runs of rows, of the weights and of what blocks make of them

The importance of an error is that of its column, and of the matrix where rows are of several.
"""

from typing import Any

from qtool.cuda.arrays import describe
from qtool.cuda.tasks import _STORED, FLOATS, Task, _place, ceil
from qtool.gguf_types import BlockType

_THREADS = 64  # of a block, and so many blocks of GGUF
# With importance, these weigh an error by the mean square of the whole row.
_BY_ROW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")


def _weights(weight: Any) -> tuple[tuple[int, int], dict[str, int]]:
    found = describe("weight", weight, FLOATS, (None, None))
    rows, cols = found.shape
    if min(rows, cols) < 1 or cols >= 1 << 28:
        raise ValueError(f"weight has shape {found.shape}, expected 1 to {(1 << 28) - 1} columns")
    place = _place("inputs", found) | {"scale_dtype": _STORED[found.dtype]}
    return (rows, cols), {**place, "rows": rows, "cols": cols}


def needs_means(block: BlockType, importance: Any) -> bool:
    """Whether `encode` of this type takes `means`."""
    return importance is not None and block.name in _BY_ROW


def needs_lattice(block: BlockType) -> bool:
    """Whether `encode` of this type takes `lattice`."""
    return block.name.startswith(("IQ1", "IQ2", "IQ3"))


def encode(
    weight: Any,
    block: BlockType,
    *,
    out: Any,
    importance: Any = None,
    means: Any = None,
    lattice: Any = None,
    first_row: int = 0,
    matrix_rows: int | None = None,
) -> tuple[Task, ...]:
    """Blocks of finite weights [rows, in]; of others, blocks of no meaning.

    importance: float32 [matrices, in]; row r is of matrix (first_row + r) // matrix_rows, and of
    the only one without matrix_rows. means: room for float32 [rows], where `needs_means`. lattice:
    both arrays of `qtool.native_gguf.lattice`, where `needs_lattice`.
    """
    (rows, cols), fields = _weights(weight)
    described = describe("out", out, ("uint8",), (rows, block.row_bytes(cols)))
    tasks: list[Task] = []
    more = _place("values", described)
    if needs_lattice(block):
        find, near = lattice
        more |= _place("codes", describe("find", find, ("int32",), (65536,)))
        more |= _place("zero", describe("near", near, ("uint16",), (None,)))
    if importance is None and block.needs_importance:
        raise ValueError(f"{block.name} needs importance weights")
    if importance is not None:
        per_matrix = first_row + rows if matrix_rows is None else matrix_rows
        if first_row < 0 or per_matrix < 1:
            raise ValueError(f"rows from {first_row} on, {per_matrix} to a matrix, expected some")
        factors = describe("importance", importance, ("float32",), (None, cols))
        wanted = ceil(first_row + rows, per_matrix)
        if factors.shape[0] < wanted:
            raise ValueError(f"importance is of {factors.shape[0]} matrices, expected {wanted}")
        more |= _place("index", factors) | {"block_rows": per_matrix, "first_row": first_row}
    if needs_means(block, importance):
        room = describe("means", means, ("float32",), (rows,))
        tasks.append(
            Task("measure_rows", (ceil(rows, 32), 1), {**fields, **_place("values", room)}, 32)
        )
        more |= _place("scale", room)
    count = rows * (cols // block.weights)
    name = f"encode_{block.name.lower()}"
    tasks.append(Task(name, (ceil(count, _THREADS), 1), {**fields, **more}, _THREADS))
    return tuple(tasks)


def squares(weight: Any, back: Any, edges: Any, *, out: Any) -> Task:
    """Sums of squares of weight [rows, in], and of its differences from back, of runs of rows.

    back: float32 [rows, in]. edges: int32 [runs + 1], the first row of each run, and the end.
    out: float64 [runs, 2], the sums that `qtool.native.sums.squares` makes of each run.
    """
    (rows, cols), fields = _weights(weight)
    fields |= _place("codes", describe("back", back, ("float32",), (rows, cols)))
    found = describe("edges", edges, ("int32",), (None,))
    runs = found.shape[0] - 1
    if runs < 1:
        raise ValueError(f"edges has {found.shape[0]} numbers, expected 2 at least")
    fields |= _place("index", found) | {"batch": runs}
    fields |= _place("values", describe("out", out, ("float64",), (runs, 2)))
    return Task("measure_squares", (ceil(runs, 16), 1), fields)
