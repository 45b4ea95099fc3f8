"""Matrices that are far from the source's of their name, and are another one of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from qtool.errors import QtoolError
from qtool.formats.dtypes import FLOAT_DTYPES
from qtool.messages.sentences import AGAIN, some, verb
from qtool.messages.sentences import count as counted
from qtool.scheme import GroupQuant
from qtool.streaming.weights import Weights, rows_of
from qtool.verification.against.compared import LOST, Compared
from qtool.verification.against.side_by_side import Floats, norm, rows_of_quant
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "swapped"
ROWS = 32  # are compared with those of each matrix of the same shape
_LIKE = 0.8  # cosine: codes of two bits leave more, chance in 32 rows none
MOST = 0.5  # of the matrices: more are another model's
LOOKED_AT = 64  # of those that are lost


def swapped(subject: Subject, compared: Sequence[Compared]) -> dict[str, str]:
    """By matrix, the one of the source that it is, of those that are another one's."""
    source = subject.source
    lost = [c.name for c in compared if c.groups and c.error > LOST]
    if source is None or not lost or len(lost) > MOST * len(compared):
        return {}
    read = {name: _start(subject, name) for name in lost[:LOOKED_AT]}
    starts = {name: rows for name, rows in read.items() if rows is not None}
    return nearest_of(starts, _of_source(source, starts))


def check_swapped(found: Mapping[str, str]) -> Iterator[Finding]:
    """swapped: no matrix is what the source has by another name. found: see `swapped`."""
    if found:
        pairs = [f"{name} is the source's {other}" for name, other in found.items()]
        yield Finding(
            "error", CHECK, next(iter(found)),
            f"{counted(len(found), 'matrix')} {verb(len(found), 'stand', 'stands')} under "
            f"{verb(len(found), 'names', 'a name')} of another: {some(pairs)}; {AGAIN}",
        )  # fmt: skip


def _start(subject: Subject, name: str) -> Floats | None:
    """The first rows of a matrix of codes."""
    try:
        quant = subject.artifact.read(name)
    except QtoolError:
        return None
    if not isinstance(quant, GroupQuant):
        return None
    return rows_of_quant(quant)(0, min(ROWS, quant.shape[0]))


def _of_source(source: Weights, starts: Mapping[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """The first rows of each matrix of the source that has the shape of one of these."""
    wanted = {source.tensors[name].shape for name in starts}
    for name, info in source.tensors.items():
        if info.shape in wanted and info.dtype in FLOAT_DTYPES:
            yield name, rows_of(source, name, in_parts=True)(0, min(ROWS, info.shape[0]))


def nearest_of(
    starts: Mapping[str, Floats], source: Iterable[tuple[str, Floats]]
) -> dict[str, str]:
    """By matrix, the one of the source that it is, by the first rows of both; those that none is
    alike are left out."""
    best: dict[str, tuple[float, str]] = {}
    here = {name: _both(rows) for name, rows in starts.items()}
    shapes = {rows.shape for rows in starts.values()}
    for other, rows in source:
        if rows.shape not in shapes:
            continue
        there = _both(rows)
        for name, both in here.items():
            if name != other and starts[name].shape == rows.shape:
                alike = max(float(np.vdot(one, two)) for one, two in zip(both, there, strict=True))
                best[name] = max(best.get(name, (_LIKE, "")), (alike, other))
    return {name: other for name, (_, other) in best.items() if other}


def _even(rows: Floats) -> Floats:
    """With columns and rows of one length, so that scales folded into them do not count."""
    for axis in (0, 1):
        size = np.sqrt(np.square(rows).mean(axis=axis, keepdims=True))
        rows = (rows / np.where(size > 0, size, 1)).astype(np.float32)
    return rows


def _both(rows: Floats) -> tuple[Floats, Floats]:
    """As they are and even, each of length 1, so that their products are cosines."""
    return _unit(rows), _unit(_even(rows))


def _unit(rows: Floats) -> Floats:
    """Of length 1; zeros where there is no telling."""
    size = norm(rows)
    return rows / np.float32(size) if size and np.isfinite(size) else np.zeros_like(rows)
