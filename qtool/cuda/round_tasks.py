"""Tasks that round to small floats: scales, the search for better ones, codes and what these stand
for (kernels/cuda/round.h).

Matrices lie column after column, [in, out], scales as float32 [groups, rows of scales]. The
arithmetic is that of `qtool.small_floats` and `qtool.native.small_floats`.
"""

import struct
from typing import Any

from qtool.cuda.arrays import describe
from qtool.cuda.quantize_tasks import blocks_across, of_matrix
from qtool.cuda.tasks import Task, _place, ceil
from qtool.native.small_floats import BOOKS

_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "e8m0": 3, "float8_e4m3": 4}
_TOPS, _ROWS, _ROWS_ROUNDED, _COLUMNS_ROUNDED = 256, 64, 256, 8  # of a block of threads


def scales_of(tops: Any, book: str, scale_dtype: str, *, outer: float = 1.0, out: Any) -> Task:
    """Scales of max|w|, float32 of any shape: numbers that scale_dtype has, none of them zero.

    outer: of two levels, what max|w| is multiplied by.
    """
    if scale_dtype not in _DTYPES:
        raise ValueError(f"scale_dtype is {scale_dtype!r}, expected {', '.join(_DTYPES)}")
    found = describe("tops", tops, ("float32",), (None,) * len(tops.shape))
    made = describe("out", out, ("float32",), found.shape)
    fields = _place("weight", found) | _place("values", made) | _book(book, outer)
    count = found.nbytes // 4
    fields |= {"cols": count, "scale_dtype": _DTYPES[scale_dtype]}
    return Task("round_scales", (ceil(count, _TOPS), 1), fields, _TOPS)


def search(
    weight: Any,
    scale: Any,
    book: str,
    group_size: int,
    *,
    factors: Any = None,
    steps: Any = None,
    outer: float = 1.0,
    importance: Any = None,
    out: Any,
) -> Task:
    """native.small_floats.best_scales of weight [in, out] into out; scale, out: [groups, out].

    factors: float32 [n], or steps: int32 [n]. importance: [in].
    """
    if (factors is None) == (steps is None):
        raise ValueError("factors or steps are needed, one of them")
    fields, groups = _matrix(weight, group_size)
    rows, cols = fields["rows"], fields["cols"]
    fields |= _place("scale", describe("scale", scale, ("float32",), (groups, rows)))
    fields |= _place("values", describe("out", out, ("float32",), (groups, rows)))
    if steps is not None:
        tried = describe("steps", steps, ("int32",), (None,))
        fields |= _place("index", tried)
    else:
        tried = describe("factors", factors, ("float32",), (None,))
        fields |= _place("ratios", tried)
    fields |= {"ratio_count": tried.shape[0]} | _book(book, outer)
    if importance is not None:
        fields |= _place("importance", describe("importance", importance, ("float32",), (cols,)))
    kernel = "round_search" if importance is None else "round_weighed"
    return Task(kernel, (ceil(rows, _ROWS), blocks_across(groups)), fields, _ROWS)


def round_weights(
    weight: Any,
    scale: Any,
    book: str,
    group_size: int,
    block_rows: int = 1,
    *,
    outer: float = 1.0,
    out: Any,
) -> Task:
    """Codes of weight [in, out] where out is uint8, what they stand for where it is float32.

    scale: [groups, ceil(out / block_rows)], each of so many rows and columns.
    """
    fields, groups = _matrix(weight, group_size)
    rows, cols = fields["rows"], fields["cols"]
    if block_rows < 1:
        raise ValueError(f"block_rows is {block_rows}, expected at least 1")
    found = describe("scale", scale, ("float32",), (groups, ceil(rows, block_rows)))
    values = describe("out", out, ("uint8", "float32"), (cols, rows))
    fields |= _place("scale", found) | _place("values", values) | _book(book, outer)
    fields |= {"block_rows": block_rows}
    kernel = "round_codes" if values.dtype == "uint8" else "round_values"
    blocks = (ceil(rows, _ROWS_ROUNDED), blocks_across(ceil(cols, _COLUMNS_ROUNDED)))
    return Task(kernel, blocks, fields, _ROWS_ROUNDED)


def _book(book: str, outer: float) -> dict[str, int]:
    if book not in BOOKS:
        raise ValueError(f"book is {book!r}, expected {', '.join(BOOKS)}")
    return {"bits": BOOKS[book], "outer": int.from_bytes(struct.pack("<f", outer), "little")}


def _matrix(weight: Any, group_size: int) -> tuple[dict[str, int], int]:
    """Fields of weight [in, out], and its number of groups."""
    found = describe("weight", weight, ("float32",), (None, None))
    cols, rows = found.shape
    fields = of_matrix(found, cols, rows, group_size)
    return fields, ceil(cols, group_size)
