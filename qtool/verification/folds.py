"""Scales that were moved between layers, accounted for.

A fold (AWQ, SmoothQuant) multiplies the columns of all readers of an input, and divides what makes
that input: a norm, or the rows of a projection. Each half that is found must have its other half.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from qtool import structure
from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.verification.finding import Finding
from qtool.verification.scaling import SURE, Compared, Floats, norm, spread, uneven
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some
from qtool.verification.subject import Subject

_PLUS_ONE = " (1 + weight)"
_MATCH = 0.1  # of the logarithm: how well two halves of a fold must fit
_CHANCE = 0.25  # of the logarithm: rows that differ less may do so by rounding


def changed_norms(subject: Subject) -> dict[str, dict[str, Floats]]:
    """By block ("" outside): of vectors that differ from the source, old / new weight."""
    found: dict[str, dict[str, Floats]] = defaultdict(dict)
    if subject.source is None:
        return found
    for name, entry in subject.entries.items():
        if entry.scheme is not None or len(entry.shape) != 1 or not name.endswith(".weight"):
            continue
        if name not in subject.source.tensors or entry.dtype not in FLOAT_DTYPES:
            continue
        old = subject.source.float32(name)
        new = subject.artifact.checkpoint.float32(entry.stored[0])
        if old.shape != new.shape or norm(old - new) <= 1e-3 * norm(old):
            continue
        for one, key in ((0, name), (1, name + _PLUS_ONE)):
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = (old + one) / (new + one)
            good = np.isfinite(ratio) & (ratio > 0)
            found[block_of(subject, name)][key] = np.where(good, ratio, 1).astype(np.float32)
    return found


def block_of(subject: Subject, name: str) -> str:
    """`model.layers.3`, or "" for what is in no block."""
    blocks = subject.blocks
    if blocks is None or not name.startswith(blocks.prefix + "."):
        return ""
    number = name[len(blocks.prefix) + 1 :].split(".", 1)[0]
    return f"{blocks.prefix}.{number}" if number.isdecimal() else ""


def check_folds(
    subject: Subject,
    compared: Sequence[Compared],
    norms: Mapping[str, Mapping[str, Floats]],
) -> Iterator[Finding]:
    """folds: what one layer was multiplied by, another was divided by."""
    readers: dict[str, list[Compared]] = defaultdict(list)
    sites: dict[str, list[Compared]] = defaultdict(list)
    for c in compared:
        if c.norm is not None:
            readers[c.norm.removesuffix(_PLUS_ONE)].append(c)
        sites[structure.input_site(c.name.removesuffix(".weight"))].append(c)
    idle = {
        key.removesuffix(_PLUS_ONE)
        for block in norms.values()
        for key, ratio in block.items()
        if uneven(ratio) > _MATCH
    } - readers.keys()
    if idle:
        names = sorted(idle)
        yield Finding(
            "error", "folds", names[0],
            f"{counted(len(idle), 'norm')} differ from the source ({some(names)}), and no layer "
            "was scaled to make up for it; is it the model that this artifact was made of?",
        )  # fmt: skip
    left = [
        c.name
        for members in sites.values()
        if len({m.norm for m in members}) > 1
        for c in members
        if c.norm is None
    ]
    if left:
        yield Finding(
            "error", "folds", left[0],
            f"{counted(len(left), 'matrix')} ({some(left)}) read a norm that was divided by "
            "scales, and were not multiplied by them as their neighbours were; make the artifact "
            "again",
        )  # fmt: skip
    halves = [
        c.name
        for group in _by_block(subject, compared).values()
        for c in group
        if _half(subject, c, group)
    ]
    if halves:
        yield Finding(
            "error", "folds", halves[0],
            f"{counted(len(halves), 'matrix')} ({some(halves)}) have scales folded in, and no "
            "layer before or after has the inverse; make the artifact again",
        )  # fmt: skip


def settled(subject: Subject, compared: Sequence[Compared]) -> list[Compared]:
    """Scales without a counterpart are chance where the scheme explains the error without them:
    rounding errors that depend on the column, as GPTQ's do, look like scales."""
    found = {c.name: c for c in compared}
    for group in _by_block(subject, compared).values():
        names = [c.name for c in group]
        changed = True
        while changed:
            changed = False
            for name in names:
                c, near = found[name], [found[n] for n in names]
                if not _half(subject, c, near):
                    continue
                if c.norm is None and c.plainly_explained:
                    found[name], changed = c.as_it_is(), True
                elif c.norm is not None and uneven(c.rows) < _CHANCE:
                    found[name], changed = replace(c, rows=None), True
    return [found[c.name] for c in compared]


def _by_block(subject: Subject, compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    """The matrices with scales, by block."""
    groups: dict[str, list[Compared]] = defaultdict(list)
    for c in compared:
        if c.columns is not None or c.rows is not None:
            groups[block_of(subject, c.name)].append(c)
    return groups


def _half(subject: Subject, c: Compared, near: Sequence[Compared]) -> bool:
    """Whether the scales of a matrix have no counterpart in its block; its neighbours first."""
    parent = c.name.removesuffix(".weight").rpartition(".")[0] + "."
    others = sorted((o for o in near if o is not c), key=lambda o: not o.name.startswith(parent))
    if c.columns is not None and c.norm is None:
        made = (o.rows for o in others if o.rows is not None)
        return not any(_inverse(subject, rows, c.columns) for rows in made)
    if c.rows is not None:
        read = (o.columns for o in others if o.columns is not None and o.norm is None)
        return not any(_inverse(subject, c.rows, columns) for columns in read)
    return False


def _inverse(subject: Subject, rows: Floats, columns: Floats) -> bool:
    """Whether rows [out] of a producer and columns [in] of a reader cancel."""
    inverse = (1 / rows).astype(np.float32)
    if rows.size >= columns.size:  # larger: q, k and v, or gate and up, in one
        ends = (inverse[rows.size - columns.size :], inverse[: columns.size])
        return any(_fits(end, columns) for end in ends)
    if columns.size % rows.size:
        return False
    width = _head_width(subject)
    if width is None or rows.size % width:
        return False
    repeats = columns.size // rows.size
    heads = np.repeat(inverse.reshape(-1, width), repeats, axis=0).reshape(-1)
    return _fits(heads, columns)


def _fits(one: Floats, other: Floats) -> bool:
    """Whether two sets of scales are the same, and differ enough among themselves to tell."""
    return spread(one, other) < min(_MATCH, SURE * uneven(other))


def _head_width(subject: Subject) -> int | None:
    text = structure.text_config(subject.config)
    width = text.get("head_dim")
    if isinstance(width, int) and width > 0:
        return width
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden // heads
    return None
