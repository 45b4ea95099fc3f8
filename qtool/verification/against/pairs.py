"""Halves of folds that belong together: what one matrix has taken in, another has given away.

    columns [in] of a reader           the inverse rows of what makes its input
    rows of the queries of a head      the inverse rows of the keys that they meet

Either may be a part of a larger matrix (queries, keys and values, or gate and up, in one):
`qtool.transforms.places` says where. What is left of the rows, once all that has another half is
taken out, has to be even.

Where AWQ scales the columns of a reader about alike, they are hardly more than one factor of the
whole matrix, which is as well one of its rows: the other half may then be either's. One factor is
easily another one's inverse by chance, so such halves have to be in one module.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtool.artifacts.cache_scales import key_heads
from qtool.checkpoints import structure
from qtool.transforms.places import Index, head_places, row_maps
from qtool.verification.against.compared import Compared
from qtool.verification.against.fit import MATCH, distance, spread, uneven
from qtool.verification.against.side_by_side import Floats

_COARSE = 1.0  # of a relative error: how well, where rounding blurs them more than that
_SURE = 0.5  # of their own spread: two sets of scales nearer than this belong together


@dataclass(frozen=True)
class Heads:
    """How wide a head is, and how many of queries and keys there are; None where not known."""

    width: int | None
    queries: int | None
    keys: int | None


def heads_of(config: Mapping[str, Any]) -> Heads:
    """As config.json says."""
    text = structure.text_config(config)
    named = (text.get(key) for key in ("num_attention_heads", "n_head"))
    queries = next((value for value in named if type(value) is int and value > 0), None)
    width, hidden = text.get("head_dim"), text.get("hidden_size")
    if type(width) is not int or width <= 0:
        width = hidden // queries if type(hidden) is int and queries else None
    return Heads(width or None, queries, key_heads(config))


def unpaired(c: Compared, near: Sequence[Compared], heads: Heads) -> bool:
    """Whether scales of a matrix have no other half among the matrices near it."""
    parent = _module(c)
    others = sorted((o for o in near if o is not c), key=lambda o: not o.name.startswith(parent))
    undone = any(True for other in others for _ in made(other, c, heads))
    if c.columns is not None and c.norm is None and not undone:
        return True
    if c.rows is None or (c.as_columns is not None and undone):
        return False
    left = np.ones(c.rows.size, bool)
    exact = has_exact_rows(c)
    for index in _found(c, others, heads):
        left[index] = False
        if not left.any() or _even(c.rows[left], exact):
            return False
    return not _even(c.rows[left], exact)


def has_exact_rows(c: Compared) -> bool:
    """Whether the rows of a matrix are known for themselves; else up to a factor, which may be the
    ratio of a norm that is about even."""
    return c.norm is not None or (c.columns is None and not c.could)


def is_compensated_for(c: Compared, near: Sequence[Compared], heads: Heads) -> bool:
    """Whether the one factor of a matrix, its `rows` and `as_columns`, has another half."""
    others = [o for o in near if o.name != c.name]
    undone = any(True for other in others for _ in made(other, c, heads))
    return undone or (c.rows is not None and any(True for _ in _found(c, others, heads)))


def _even(rows: Floats, exact: bool) -> bool:
    return distance(rows, np.ones_like(rows)) < MATCH if exact else uneven(rows) < MATCH


def _found(c: Compared, others: Sequence[Compared], heads: Heads) -> Iterator[Index]:
    """Rows of a matrix that have another half."""
    assert c.rows is not None
    for other in others:
        yield from made(c, other, heads)
    for other in (c, *others):
        if other.rows is not None:
            blur = _blur(c, other)
            yield from _met(c.rows, other.rows, heads, blur)
            for index, theirs in _meetings(other.rows, c.rows, heads):
                if _cancels(other.rows[index], c.rows[theirs], blur):
                    yield theirs


def _blur(one: Compared, other: Compared) -> float:
    """How well halves must fit that were found in matrices as coarse as these."""
    return max(MATCH, _COARSE * max(one.error, other.error))


def _module(c: Compared) -> str:
    """`model.layers.3.mlp.`"""
    return c.name.removesuffix(".weight").rpartition(".")[0] + "."


def made(maker: Compared, reader: Compared, heads: Heads) -> Iterator[Index]:
    """Rows that columns of a reader undo."""
    factor = reader.as_columns is not None
    columns = reader.as_columns if factor or reader.norm is not None else reader.columns
    if maker.rows is None or columns is None or (factor and _module(maker) != _module(reader)):
        return
    blur = _blur(maker, reader)
    for index in row_maps(maker.rows.size, columns.size, heads.width):
        if _cancels(maker.rows[index], columns, blur, factor):
            yield index


def _met(keys: Floats, queries: Floats, heads: Heads, blur: float) -> Iterator[Index]:
    """Rows of keys that rows of queries undo."""
    for index, theirs in _meetings(keys, queries, heads):
        if _cancels(keys[index], queries[theirs], blur):
            yield index


def _meetings(keys: Floats, queries: Floats, heads: Heads) -> Iterator[tuple[Index, Index]]:
    """Where keys may stand in one set of rows, and queries of the same heads in another."""
    width = heads.width
    if not width or not heads.keys or not heads.queries or heads.queries % heads.keys:
        return
    if keys.size % width or queries.size % width:
        return
    repeats = heads.queries // heads.keys
    channel = np.arange(width)
    for key in head_places(keys.size // width, heads.keys):
        for query in head_places(queries.size // width, heads.queries):
            if key.size == heads.keys and query.size == heads.queries:
                yield (
                    (key.repeat(repeats)[:, None] * width + channel).reshape(-1),
                    (query[:, None] * width + channel).reshape(-1),
                )


def _cancels(rows: Floats, columns: Floats, blur: float, factor: bool = False) -> bool:
    """Whether scales are each other's inverse, and differ enough among themselves to tell.
    factor: what they have in common has to be, too."""
    inverse = (1 / rows).astype(np.float32)
    flat = np.ones_like(columns)
    near, far = spread(inverse, columns), distance(inverse, columns)
    if far < min(blur, _SURE * distance(columns, flat)):
        return True
    return not factor and near < min(blur, _SURE * uneven(columns))
