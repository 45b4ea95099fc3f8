"""Scales that were moved between layers, accounted for.

A fold (AWQ, SmoothQuant) multiplies the columns of all readers of an input, and divides what makes
that input: a norm, or the rows of a projection; SmoothAttention multiplies rows of queries, and
divides those of keys. Each half that is found must have its other half.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from qtool.checkpoints import structure
from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some, verb
from qtool.verification import config
from qtool.verification.against.compared import Compared
from qtool.verification.against.fit import MATCH, uneven
from qtool.verification.against.likeness import others
from qtool.verification.against.pairs import heads_of, unpaired
from qtool.verification.against.side_by_side import Floats, norm
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

PLUS_ONE = " (1 + weight)"
BEFORE = (  # of what differs from the source for that
    "scales were folded before it was dequantized, and are not looked for in its rounded matrices"
)


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
        if not others(new, old, ("BF16", "F32")).any():
            continue  # cast, if by way of another dtype than it is stored in, and no more
        for one, key in ((0, name), (1, name + PLUS_ONE)):
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
    others: Container[str] = (),
) -> Iterator[Finding]:
    """folds: what one layer was multiplied by, another was divided by. others: matrices that are
    told to be other ones."""
    # The check of scales tells of those that are NaN or infinite; their blocks tell nothing here.
    wrong = [c.name for c in compared if c.name in others or not math.isfinite(c.error)]
    broken = {block_of(subject, name) for name in wrong}
    compared = [c for c in compared if block_of(subject, c.name) not in broken]
    norms = {block: ratios for block, ratios in norms.items() if block not in broken}
    sites: dict[str, list[Compared]] = defaultdict(list)
    for c in compared:
        sites[structure.input_site(c.name.removesuffix(".weight"))].append(c)
    idle = idle_norms(compared, norms)
    names = sorted(idle)
    if idle and config.dequantized(subject):
        yield Finding(
            "note", "folds", names[0],
            f"{counted(len(idle), 'norm')} {verb(len(idle), 'differ', 'differs')} from the source "
            f"({some(names)}): {BEFORE}",
        )  # fmt: skip
    elif idle:
        yield Finding(
            "error", "folds", names[0],
            f"{counted(len(idle), 'norm')} {verb(len(idle), 'differ', 'differs')} from the source "
            f"({some(names)}), and no layer was scaled to compensate for it; is it the model that "
            "this artifact was made of?",
        )  # fmt: skip
    left = [
        c.name
        for members in sites.values()
        if len({m.norm for m in members}) > 1
        for c in members
        if c.norm is None and not c.could & {m.norm for m in members}
    ]
    if left:
        yield Finding(
            "error", "folds", left[0],
            f"{counted(len(left), 'matrix')} ({some(left)}) read a norm that was divided by "
            "scales, and were not multiplied by them as their neighbours were; make the artifact "
            "again",
        )  # fmt: skip
    heads = heads_of(subject.config)
    halves = [
        c.name
        for group in _by_block(subject, compared).values()
        for c in group
        if not c.untold and unpaired(c, group, heads)
    ]
    if halves:
        yield Finding(
            "error", "folds", halves[0],
            f"{counted(len(halves), 'matrix')} ({some(halves)}) "
            f"{verb(len(halves), 'have', 'has')} scales folded in, and no layer before or after "
            "has the inverse; make the artifact again",
        )  # fmt: skip


def idle_norms(compared: Sequence[Compared], norms: Mapping[str, Mapping[str, Floats]]) -> set[str]:
    """Norms whose channels differ, each by its own factor, and whose ratio no matrix has."""
    read = {c.norm.removesuffix(PLUS_ONE) for c in compared if c.norm is not None}
    # Codes of two bits may be too coarse to tell.
    read |= {key.removesuffix(PLUS_ONE) for c in compared for key in c.could}
    uneven_ones = {
        key.removesuffix(PLUS_ONE)
        for block in norms.values()
        for key, ratio in block.items()
        if uneven(ratio) > MATCH
    }
    return uneven_ones - read


def settled(subject: Subject, compared: Sequence[Compared]) -> list[Compared]:
    """Scales without a counterpart are chance where the scheme explains the error without them:
    rounding errors that depend on the column, as GPTQ's do, look like scales."""
    found = {c.name: c for c in compared}
    heads = heads_of(subject.config)
    for group in _by_block(subject, compared).values():
        names = [c.name for c in group]
        changed = True
        while changed:
            changed = False
            for name in names:
                c, near = found[name], [found[n] for n in names]
                if c.untold or not unpaired(c, near, heads):
                    continue
                if c.norm is None and c.plainly_explained:
                    # Of an error that is larger than the matrix, nobody would want to read, but
                    # where it is one factor that makes it.
                    small = c.plain_error <= 1 or bool(c.plainly_like and c.plainly_like.scaled)
                    found[name], changed = c.as_it_is() if small else replace(c, untold=True), True
                elif c.norm is not None and c.rows is not None and c.rows_by_chance:
                    found[name], changed = replace(c, rows=None), True
    return [found[c.name] for c in compared]


def _by_block(subject: Subject, compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    """The matrices with scales, by block."""
    groups: dict[str, list[Compared]] = defaultdict(list)
    for c in compared:
        if c.columns is not None or c.rows is not None:
            groups[block_of(subject, c.name)].append(c)
    return groups
