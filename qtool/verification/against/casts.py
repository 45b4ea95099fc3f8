"""Unquantized tensors that have the source's numbers, in its dtype or rounded to another."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.streaming.weights import rows_of
from qtool.verification.against.likeness import others
from qtool.verification.against.side_by_side import SideBySide, square_of
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

ROUNDING = 0.01  # relative: what another dtype may change
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_EXACT = {("BF16", "F32"), ("F16", "F32"), ("BF16", "F64"), ("F16", "F64"), ("F32", "F64")}


def same(subject: Subject, name: str) -> bool:
    """Whether a dense tensor has the source's bytes; a part in memory at a time."""
    entry, source = subject.entries[name], subject.source
    assert source is not None
    if entry.dtype != source.tensors[name].dtype or not entry.shape:
        return False
    rows = entry.shape[0]
    step = max(1, (rows << 24) // max(1, entry.nbytes))
    return all(
        np.array_equal(
            subject.artifact.checkpoint.part(entry.stored[0], at, min(rows, at + step)),
            source.part(name, at, min(rows, at + step)),
        )
        for at in range(0, rows, step)
    )


def only_cast(subject: Subject, name: str) -> bool:
    """Whether a matrix has the source's numbers, but for what another dtype rounds."""
    entry, source = subject.entries[name], subject.source
    assert source is not None
    kinds = entry.dtype, source.tensors[name].dtype
    if kinds[0] == kinds[1] or len(entry.shape) != 2:
        return False
    stored = rows_of(subject.artifact.checkpoint, entry.stored[0])
    pair = SideBySide((entry.shape[0], entry.shape[1]), stored, rows_of(source, name))
    lost = whole = 0.0
    for _, new, old in pair.pieces():
        if others(new, old, kinds).any():
            return False
        lost += square_of(old - new)
        whole += square_of(old)
    return lost <= ROUNDING**2 * whole


def told(check: str, cast: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """A note of matrices that are stored in a dtype that cannot hold each number of the source's.
    cast: by matrix, the source's dtype and the artifact's."""
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, dtypes in cast.items():
        if dtypes not in _EXACT:
            kinds[dtypes].append(name)
    for dtypes, names in kinds.items():
        was, now = (_NAMES.get(dtype, dtype) for dtype in dtypes)
        yield Finding(
            "note", check, names[0],
            f"{counted(len(names), 'unquantized matrix')} ({some(names)}) in {now}, in the source "
            f"{was}: the same numbers but for what the cast rounds",
        )  # fmt: skip
