"""Tasks that quantize to integer grids, and that sweep a block of columns as GPTQ does, onto these
or onto given levels.

Matrices lie column after column, [in, out], scales and zeros as pairs of float32, [groups, out, 2]:
see kernels/cuda/quantize.h. The arithmetic is that of `qtool.native.rounding`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.cuda.arrays import Array, describe
from qtool.cuda.tasks import _STORED, Task, _place, ceil

MOST_IN_BLOCK = 128  # columns of a sweep
MOST_IN_GRAM = 256  # columns of a group whose error is weighed by the Gram matrix
_ROWS, _ROWS_ROUNDED, _COLUMNS_ROUNDED = 64, 256, 8  # of a block of threads
_MOST_ACROSS = 65535  # blocks of threads in y
_WIDEST = 1 << 28


@dataclass(frozen=True)
class Grid:
    """Of all groups of a matrix."""

    bits: int
    symmetric: bool
    reach: float
    scale_dtype: str = "float16"

    def fields(self) -> dict[str, int]:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}, expected 2 to 8")
        return {
            "bits": self.bits,
            "symmetric": int(self.symmetric),
            "reach": int.from_bytes(struct.pack("<f", self.reach), "little"),
            "scale_dtype": _STORED[self.scale_dtype],
        }


def padded(count: int) -> int:
    """The next multiple of four numbers, which a kernel reads at once."""
    return ceil(count, 4) * 4


def find_groups(
    weight: Any,
    grid: Grid,
    group_size: int,
    *,
    out: Any,
    ratios: Any = None,
    importance: Any = None,
    gram: Any = None,
) -> Task:
    """The grids of all groups of weight [in, out] into out [groups, out, 2].

    ratios: float32 [n], of the range, to search. importance: [in]. gram: [groups, p, p] with p =
    padded(group_size), twice the entries of H above the diagonal and zeros below; not both.
    """
    found = describe("weight", weight, ("float32",), (None, None))
    cols, rows = found.shape
    groups = ceil(cols, group_size)
    fields = of_matrix(found, cols, rows, group_size) | grid.fields()
    how = "full"
    if ratios is not None:
        tried = describe("ratios", ratios, ("float32",), (None,))
        fields |= _place("ratios", tried) | {"ratio_count": tried.shape[0]}
        how = "searched"
    if importance is not None:
        fields |= _place("importance", describe("importance", importance, ("float32",), (cols,)))
        how = "weighed"
    if gram is not None:
        pitch = padded(group_size)
        if group_size > MOST_IN_GRAM:
            raise ValueError(f"groups of {group_size}, expected at most {MOST_IN_GRAM} with gram")
        fields |= _place("gram", describe("gram", gram, ("float32",), (groups, pitch, pitch)))
        fields |= {"pitch": pitch}
        how = "by_gram"
    if (importance is not None or gram is not None) and (
        ratios is None or (importance is not None and gram is not None)
    ):
        raise ValueError("importance or gram, one of them, is for a search: ratios are needed")
    pairs = describe("out", out, ("float32",), (groups, rows, 2))
    return _task(f"groups_{how}", rows, groups, fields | _place("values", pairs))


def round_weights(weight: Any, scales: Any, bits: int, group_size: int, *, out: Any) -> Task:
    """Codes of weight [in, out] where out is uint8, what they stand for where it is float32."""
    found = describe("weight", weight, ("float32",), (None, None))
    cols, rows = found.shape
    pairs = describe("scales", scales, ("float32",), (ceil(cols, group_size), rows, 2))
    values = describe("out", out, ("uint8", "float32"), (cols, rows))
    fields = of_matrix(found, cols, rows, group_size) | {"bits": bits}
    fields |= _place("scale", pairs) | _place("values", values)
    kernel = "codes" if values.dtype == "uint8" else "values"
    blocks = (ceil(rows, _ROWS_ROUNDED), blocks_across(ceil(cols, _COLUMNS_ROUNDED)))
    return Task(f"quantize_{kernel}", blocks, fields, _ROWS_ROUNDED)


def sweep_block(weight: Any, factor: Any, scales: Any, index: Any, bits: int, *, out: Any) -> Task:
    """One block of the sweep: weight [n, out], which the blocks before it have paid already.

    factor: [n, padded(n)], row i with U[k,i] for k up to i. scales: [groups, out, 2]; index: int32
    [n], the group of each column, which the caller checks. out: [2, n, out], minus the errors,
    then the codes.
    """
    return _sweep("sweep", weight, factor, scales, index, {"bits": bits}, out)


def sweep_onto_levels(
    weight: Any, factor: Any, scales: Any, index: Any, book: Any, consecutive: bool, *, out: Any
) -> Task:
    """The same onto levels scale * number - offset, scales being these pairs.

    book: float32 [3, numbers], these in order, their codes, and the middle between each and the one
    before; consecutive: they are whole, each one more than the one before, codes likewise.
    """
    numbers = describe("book", book, ("float32",), (3, None))
    fields = _place("ratios", numbers) | {"ratio_count": numbers.shape[1]}
    fields |= {"symmetric": int(consecutive)}
    return _sweep("sweep_levels", weight, factor, scales, index, fields, out)


def in_order(book: NDArray[np.float32]) -> tuple[NDArray[np.float32], bool]:
    """A book [numbers] as sweep_onto_levels takes it, and whether its numbers are consecutive; as
    sort_book of kernels/levels_body.h has it."""
    value, code = np.unique(book, return_index=True)  # of equal numbers the first
    middle = value.copy()
    middle[1:] = (value[:-1] + value[1:]) / np.float32(2)
    steps = np.arange(len(value))
    whole = abs(value[0]) < 1 << 20 and value[0] == np.trunc(value[0])
    consecutive = whole and (value == value[0] + steps).all() and (code == steps).all()
    return np.stack([value, code.astype(np.float32), middle]), bool(consecutive)


def _sweep(
    kernel: str,
    weight: Any,
    factor: Any,
    scales: Any,
    index: Any,
    fields: Mapping[str, int],
    out: Any,
) -> Task:
    found = describe("weight", weight, ("float32",), (None, None))
    cols, rows = found.shape
    if not 1 <= cols <= MOST_IN_BLOCK:
        raise ValueError(f"a block of {cols} columns, expected 1 to {MOST_IN_BLOCK}")
    more = of_matrix(found, cols, rows, cols) | {"pitch": padded(cols)}
    more |= _place("gram", describe("factor", factor, ("float32",), (cols, padded(cols))))
    more |= _place("scale", describe("scales", scales, ("float32",), (None, rows, 2)))
    more |= _place("index", describe("index", index, ("int32",), (cols,)))
    more |= _place("values", describe("out", out, ("float32",), (2, cols, rows)))
    return _task(kernel, rows, 1, {**fields, **more})


def of_matrix(weight: Array, cols: int, rows: int, group_size: int) -> dict[str, int]:
    """Fields of weight [in, out] in groups of columns."""
    if min(cols, rows, group_size) < 1 or cols >= _WIDEST:
        raise ValueError(f"a matrix of {rows} x {cols} in groups of {group_size}")
    return _place("weight", weight) | {"rows": rows, "cols": cols, "group_size": group_size}


def _task(kernel: str, rows: int, across: int, fields: Mapping[str, int]) -> Task:
    return Task(f"quantize_{kernel}", (ceil(rows, _ROWS), blocks_across(across)), fields, _ROWS)


def blocks_across(blocks: int) -> int:
    """Blocks of threads in y; ValueError where a grid has no room for them."""
    if blocks > _MOST_ACROSS:
        raise ValueError(f"{blocks} blocks of columns, expected at most {_MOST_ACROSS}")
    return blocks
