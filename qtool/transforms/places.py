"""Where the rows that make something may stand in a matrix that makes other things too.

Queries, keys and values, or gate and up, are one matrix in many models: one after the other, or
head by head. What is proposed here is proved or measured by who asks.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


def row_maps(rows: int, channels: int, head_dim: int | None) -> Iterator[Index]:
    """Maps from channels to rows of a matrix that might have made them."""
    channel = np.arange(channels)
    if rows == channels:
        yield channel
        return
    if rows < channels:
        if head_dim and channels % rows == 0 and rows % head_dim == 0:
            yield _shared_heads(channel, channels // rows, head_dim)
        return
    if rows == 2 * channels:  # gate and up in one: mostly the gate comes first
        yield channel + channels
        yield channel
    values = rows - channels  # queries, keys and values in one
    if values % 2 == 0 and channels % (values // 2) == 0:
        values //= 2
        if values == channels:
            yield channel + 2 * channels
            if head_dim:  # head by head
                yield channel // head_dim * (3 * head_dim) + 2 * head_dim + channel % head_dim
        elif head_dim and values % head_dim == 0:
            yield channels + values + _shared_heads(channel, channels // values, head_dim)


def _shared_heads(channel: Index, repeats: int, head_dim: int) -> Index:
    return channel // (repeats * head_dim) * head_dim + channel % head_dim


def head_places(rows: int, heads: int) -> Iterator[Index]:
    """Where heads may stand in a matrix of `rows` heads: alone, or with others in one matrix.

    Keys may be fewer than `heads`, and repeated.
    """
    for count in (n for n in range(heads, 0, -1) if heads % n == 0):
        each = np.arange(count)
        if rows == count:
            yield each
        more, rest = divmod(rows - 2 * count, count)
        if more > 0 and not rest:  # queries, keys, values; then the same head by head
            yield count * more + each
            yield each * (more + 2) + more
    others, odd = divmod(rows - heads, 2)
    if others > 0 and not odd and heads % others == 0:
        more = heads // others
        yield np.arange(heads)
        yield (np.arange(others)[:, None] * (more + 2) + np.arange(more)).reshape(-1)
