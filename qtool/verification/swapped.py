"""Matrices that are far from the source's of their name, and are another one of it."""

from collections.abc import Iterator, Sequence

import numpy as np

from qtool.errors import QtoolError
from qtool.scheme import GroupQuant
from qtool.streaming.weights import Weights, rows_of
from qtool.verification.finding import Finding
from qtool.verification.scaling import LOST, Compared
from qtool.verification.sentences import AGAIN, some, verb
from qtool.verification.sentences import count as counted
from qtool.verification.side_by_side import Floats, norm, rows_of_quant
from qtool.verification.subject import Subject

CHECK = "swapped"
_ROWS = 32  # are compared with those of each matrix of the same shape
_LIKE = 0.8  # cosine: codes of two bits and scales folded in leave more, chance in 32 rows none
_MOST = 0.5  # of the matrices: more are another model's
_LOOKED_AT = 64  # of those that are lost


def check_swapped(subject: Subject, compared: Sequence[Compared]) -> Iterator[Finding]:
    """swapped: no matrix is what the source has by another name."""
    source = subject.source
    lost = [c.name for c in compared if c.groups and c.error > LOST]
    if source is None or not lost or len(lost) > _MOST * len(compared):
        return
    found = {name: of for name in lost[:_LOOKED_AT] if (of := _other(subject, source, name))}
    if found:
        pairs = [f"{name} is the source's {other}" for name, other in found.items()]
        yield Finding(
            "error", CHECK, next(iter(found)),
            f"{counted(len(found), 'matrix')} {verb(len(found), 'stand', 'stands')} under "
            f"{verb(len(found), 'names', 'a name')} of another: {some(pairs)}; {AGAIN}",
        )  # fmt: skip


def _other(subject: Subject, source: Weights, name: str) -> str | None:
    """The matrix of the source that a matrix of the artifact is; None where none is alike."""
    try:
        quant = subject.artifact.read(name)
    except QtoolError:
        return None
    if not isinstance(quant, GroupQuant):
        return None
    shape = quant.shape
    rows = rows_of_quant(quant)(0, min(_ROWS, shape[0]))
    alike = {
        other: _cosine(rows, rows_of(source, other)(0, len(rows)))
        for other, info in source.tensors.items()
        if tuple(info.shape) == shape and other != name
    }
    best = max(alike, key=alike.__getitem__, default=None)
    return best if best is not None and alike[best] > _LIKE else None


def _cosine(one: Floats, other: Floats) -> float:
    sizes = norm(one) * norm(other)
    return float(np.vdot(one, other)) / sizes if sizes and np.isfinite(sizes) else 0.0
