"""Matrices that are the source's but for one factor, or whose scales are the reciprocals of those
that their codes were made with.

A fold (AWQ, smoothing) may be one factor, too: its inverse is then in a norm, or in a matrix before
or after. What nothing compensates for is told once, and the matrix is judged without it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from qtool.messages.sentences import AGAIN, some, verb
from qtool.messages.sentences import count as counted
from qtool.verification.against.compared import Compared
from qtool.verification.against.factors import RECIPROCALS
from qtool.verification.against.folds import PLUS_ONE, block_of, settled
from qtool.verification.against.norms import CHECK as NORMS
from qtool.verification.against.pairs import heads_of, is_compensated_for, unpaired
from qtool.verification.against.single_scales import as_words, is_folded, worst
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "layer-error"
_ALIKE = 1.1  # times: factors of the readers of one norm


def check_multiples(
    subject: Subject, compared: Sequence[Compared]
) -> tuple[list[Compared], list[Finding]]:
    """layer-error: no matrix is a multiple of the source's. Returned with the matrices, those that
    are told without their factor."""
    heads = heads_of(subject.config)
    alone = settled(subject, [c for c in compared if c.multiple is None])
    folded = {block_of(subject, c.name) for c in alone if is_folded(c)}
    blocks: dict[str, list[Compared]] = defaultdict(list)
    for c in settled(subject, compared):
        blocks[block_of(subject, c.name)].append(c)
    before = {c.name: c for c in compared}
    wrong: dict[str, Compared] = {}
    for name, block in blocks.items():
        # One factor is known well, however coarse the codes are.
        near = [replace(_as_scales(before[c.name]) if c.multiple else c, error=0.0) for c in block]
        for c in near:
            found, was = c.multiple, before[c.name]
            if found is None:
                continue
            compensated = is_compensated_for(c, near, heads)
            if name in folded:  # coarse codes may hide that its other half is no single factor
                compensated = compensated or not found.shows or not unpaired(was, block, heads)
            if found.times == RECIPROCALS or not compensated:
                wrong[c.name] = was
    rest = [c if c.name not in wrong else _without(c) for c in compared]
    return rest, [*_told(wrong, compared)]


def _as_scales(c: Compared) -> Compared:
    """A matrix with its factor in place of the scales that were found."""
    if c.multiple is None or c.rows is None or c.multiple.times == RECIPROCALS:
        return c
    rows, columns = (
        None if one is None else np.full_like(one, c.multiple.times)
        for one in (c.rows, c.as_columns)
    )
    return replace(c, rows=rows, as_columns=columns)


def _without(c: Compared) -> Compared:
    """A matrix without its factor."""
    if c.multiple is None or c.multiple.without is None:
        return replace(c, rows=None, as_columns=None)
    return replace(c.multiple.without, as_stored=c.plain_error)


def _told(wrong: dict[str, Compared], compared: Sequence[Compared]) -> Iterator[Finding]:
    times = {name: c.multiple.times for name, c in wrong.items() if c.multiple}
    inverted = [name for name, by in times.items() if by == RECIPROCALS]
    if inverted:
        yield Finding(
            "error", CHECK, inverted[0],
            f"{counted(len(inverted), 'matrix')} {verb(len(inverted), 'have', 'has')} scales that "
            "are the reciprocals of those that the codes need (1 / scale): "
            f"{some(inverted)}; {AGAIN}",
        )  # fmt: skip
    norms = _of_norms(times, compared)
    if norms:
        by_norm = [(times[readers[0]], norm) for norm, readers in norms.items()]
        yield Finding(
            "error", NORMS, worst(by_norm),
            f"{counted(len(norms), 'norm')} {verb(len(norms), 'are', 'is')} unlike the source's by "
            "more than the layers that read it compensate for: "
            f"{as_words([(by, norm) for by, norm in by_norm])}; {AGAIN}",
        )  # fmt: skip
    known = {*inverted, *(name for readers in norms.values() for name in readers)}
    for quantized, what, why in (
        (True, "matrix", "are the scales right? "),
        (False, "unquantized matrix", ""),
    ):
        found = [(by, name) for name, by in times.items()
                 if name not in known and bool(wrong[name].groups) == quantized]  # fmt: skip
        if found:
            yield Finding(
                "error", CHECK, worst(found),
                f"{counted(len(found), what)} {verb(len(found), 'are', 'is')} the source's but for "
                "a factor that no norm and no other layer compensates for: "
                f"{as_words(found)}; {why}{AGAIN}",
            )  # fmt: skip


def _of_norms(times: dict[str, float], compared: Sequence[Compared]) -> dict[str, list[str]]:
    """By norm, its readers, where all have one factor, but for those with scales of rows."""
    readers: dict[str, list[str]] = defaultdict(list)
    for c in compared:
        if c.norm is not None and (c.name in times or c.rows is None):
            readers[c.norm.removesuffix(PLUS_ONE)].append(c.name)
    found: dict[str, list[str]] = {}
    for norm, names in readers.items():
        logarithms = [math.log(times[name]) for name in names if name in times]
        if len(names) > 1 and len(logarithms) == len(names):
            alike = max(logarithms) - min(logarithms) < math.log(_ALIKE)
            found |= {norm: names} if alike else {}
    return found
