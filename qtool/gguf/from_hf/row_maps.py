"""Where a row of a GGUF tensor lies in the checkpoint's tensor, and back.

Rows are counted through all leading axes. A map works on arrays of row numbers, so that a range of
rows is rearranged without reading the others:

    gguf[r] = checkpoint[forward(r)]        checkpoint[s] = gguf[inverse(s)]

`groups` is how many heads or experts the rows fall into, `total` the number of rows of the GGUF
tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Factor = NDArray[np.float32]  # [1], or one for each row
Map = Callable[[Rows, int, int], Rows]


@dataclass(frozen=True)
class RowMap:
    """One rearrangement of rows; `groups` is the key of config.json that counts the groups.

    unit: the rows of a group are a multiple of this. share: how many GGUF tensors share the rows of
    the checkpoint's tensor. taken: how many rows the checkpoint's tensor has, and how many of them
    the GGUF tensor has, where the settings tell.
    """

    forward: Map
    inverse: Map
    groups: str
    unit: int = 1
    share: int = 1
    taken: tuple[int, int] | None = None

    def order(self, groups: int, total: int) -> Callable[[Rows], Rows]:
        """Row numbers of a GGUF tensor -> those of the checkpoint's."""
        return lambda rows: self.forward(rows, groups, total)


def _pairs(rows: Rows, groups: int, total: int) -> Rows:
    """llama.cpp rotates neighbours (2i, 2i + 1), the checkpoint has halves (i, i + size / 2)."""
    size = total // groups
    k = rows % size
    source: Rows = rows - k + (k % 2) * (size // 2) + k // 2
    return source


def _halves(rows: Rows, groups: int, total: int) -> Rows:
    size = total // groups
    k = rows % size
    target: Rows = rows - k + (k % (size // 2)) * 2 + k // (size // 2)
    return target


def _by_kind(rows: Rows, groups: int, total: int) -> Rows:
    """All queries, all keys, all values; the checkpoint has query, key, value head by head."""
    size = total // (3 * groups)
    kind, rest = np.divmod(rows, groups * size)
    head, k = np.divmod(rest, size)
    return (head * 3 + kind) * size + k


def _by_head(rows: Rows, groups: int, total: int) -> Rows:
    size = total // (3 * groups)
    head, rest = np.divmod(rows, 3 * size)
    kind, k = np.divmod(rest, size)
    return (kind * groups + head) * size + k


def _half_of_fused(half: int) -> tuple[Map, Map]:
    """One half of each expert's rows, where the checkpoint has gate above up."""

    def forward(rows: Rows, groups: int, total: int) -> Rows:
        size = total // groups
        expert, k = np.divmod(rows, size)
        return (expert * 2 + half) * size + k

    def inverse(rows: Rows, groups: int, total: int) -> Rows:
        size = total // groups
        expert, k = np.divmod(rows, 2 * size)
        return expert * size + k - half * size

    return forward, inverse


def _interleaved(half: int) -> tuple[Map, Map]:
    """Each second row, where the checkpoint interleaves those of gate and up."""

    def forward(rows: Rows, groups: int, total: int) -> Rows:
        return 2 * rows + half

    def inverse(rows: Rows, groups: int, total: int) -> Rows:
        return rows // 2

    return forward, inverse


def some_rows(first: int, last: int, total: int, groups: str) -> RowMap:
    """These rows of a matrix of so many."""

    def forward(rows: Rows, groups: int, total: int) -> Rows:
        return rows + first

    def inverse(rows: Rows, groups: int, total: int) -> Rows:
        return rows - first

    return RowMap(forward, inverse, groups, taken=(total, last - first))


def listed(order: Rows, total: int, groups: str) -> RowMap:
    """These rows of a matrix of `total`, which may be all of them."""
    places = np.argsort(order, kind="stable")

    def forward(rows: Rows, groups: int, total: int) -> Rows:
        found: Rows = order[rows]
        return found

    def inverse(rows: Rows, groups: int, total: int) -> Rows:
        found: Rows = places[np.searchsorted(order[places], rows)]
        return found

    return RowMap(forward, inverse, groups, taken=(total, len(order)))


QUERY_PAIRS = RowMap(_pairs, _halves, "num_attention_heads", unit=2)
KEY_PAIRS = RowMap(_pairs, _halves, "num_key_value_heads", unit=2)
QKV_BY_KIND = RowMap(_by_kind, _by_head, "num_attention_heads", unit=3)
FIRST_HALF = RowMap(*_half_of_fused(0), "num_experts", share=2)
SECOND_HALF = RowMap(*_half_of_fused(1), "num_experts", share=2)
EVEN_ROWS = RowMap(*_interleaved(0), "num_experts", share=2)
ODD_ROWS = RowMap(*_interleaved(1), "num_experts", share=2)
