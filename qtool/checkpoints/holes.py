"""Stretches of bytes that are 0 where no weights are: of files that were given their length before
they were fetched, and never whole.

A stretch counts from 4096 bytes on. Rows or columns that a model has lost on purpose are no holes:
whole rows begin and end where rows do, and columns leave a stretch in every row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST = 4096  # bytes
_STEP = LEAST // 2  # any stretch that counts has all of one such piece
_SEEN = LEAST // 4  # the same of half a stretch
_WORD = 8  # bytes at the beginning of each piece that are looked at first
_EDGE = 64  # bytes by which a stretch must miss the ends of rows
_MANY = 0.25  # of the rows: so many stretches have another reason

Stretch = tuple[int, int]
EMPTY = "every number is 0; the layer does nothing, unless the model has it so"


def is_bias(name: str) -> bool:
    """Whether a tensor is added, by its name, so that zeros are nothing to speak of."""
    return name.removesuffix(".weight").endswith("bias")


def said_torn(hole: int, again: str) -> str:
    """How many bytes of a tensor are in holes, and what to do."""
    return (
        f"{hole:,} bytes are 0 in long stretches that begin or end within a row: it was not "
        f"written or fetched to its end; {again}"
    )


def said_blank(hole: int, again: str) -> str:
    """The same of packed codes."""
    return (
        f"{hole:,} bytes of its codes are 0 in long stretches, which no weights are: it was not "
        f"written or fetched to its end; {again}"
    )


def may_have_zeros(data: NDArray[np.uint8]) -> bool:
    """Whether bytes [n], some of those of a tensor, may have a part of such a stretch: where one
    goes on from one read to the next, half of it is in one of the two."""
    count = data.size // _SEEN
    pieces = data[: count * _SEEN].reshape(count, _SEEN)
    begins = ~pieces[:, :_WORD].any(axis=1)
    return any(not pieces[number].any() for number in np.flatnonzero(begins))


def zero_stretches(data: NDArray[np.uint8]) -> list[Stretch]:
    """Where bytes [n] are 0 for LEAST bytes and more: first, and behind the last."""
    count = data.size // _STEP
    pieces = data[: count * _STEP].reshape(count, _STEP)
    empty = np.flatnonzero(~pieces[:, :_WORD].any(axis=1))
    if not empty.size:
        return []
    if empty.size > count // 8:
        empty = np.flatnonzero(~pieces.any(axis=1))
    else:
        empty = empty[~pieces[empty].any(axis=1)]
    if not empty.size:
        return []
    breaks = np.flatnonzero(np.diff(empty) > 1) + 1
    found = []
    for group in np.split(empty, breaks):
        first, last = int(group[0]) * _STEP, (int(group[-1]) + 1) * _STEP
        before, behind = data[max(0, first - _STEP) : first], data[last : last + _STEP]
        before_set, behind_set = np.flatnonzero(before), np.flatnonzero(behind)
        first -= before.size - 1 - int(before_set[-1]) if before_set.size else before.size
        last += int(behind_set[0]) if behind_set.size else behind.size
        if last - first >= LEAST:
            found.append((first, last))
    return found


def torn(data: NDArray[np.uint8], stretches: Sequence[Stretch], width: int) -> int:
    """The bytes of stretches of `data` that begin or end within a row of `width` bytes, and not
    with columns that are 0 in the next row too."""
    rows = data[: data.size // width * width].reshape(-1, width)

    def broken(neighbours: tuple[int, int], columns: slice) -> bool:
        there = [row for row in neighbours if 0 <= row < len(rows)]
        return not there or bool(rows[there[0], columns].any())

    found = []
    for first, last in stretches:
        (row, at), (end, behind) = divmod(first, width), divmod(last, width)
        begins = _EDGE <= at <= width - _EDGE and broken((row - 1, end + 1), slice(at, None))
        ends = _EDGE <= behind <= width - _EDGE and broken((end + 1, row - 1), slice(behind))
        if begins or ends:
            found.append(last - first)
    return 0 if len(found) > max(1, _MANY * len(rows)) else sum(found)
