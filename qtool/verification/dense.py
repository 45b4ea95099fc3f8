"""The unquantized tensors: finite, and not wiped out."""

from collections.abc import Iterator

import numpy as np

from qtool.artifact import Entry
from qtool.checkpoint import Checkpoint
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

_AT_ONCE = 1 << 24  # bytes
# By dtype: what the bits of a number are masked with, and what is left of NaN and infinity.
_MASKS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}


def check_dense(subject: Subject) -> Iterator[Finding]:
    """dense-values: of every tensor that is stored as floats."""
    for name, entry in subject.entries.items():
        if entry.scheme is not None or entry.dtype not in _MASKS or not entry.parameters:
            continue
        bad, empty = _look(subject.artifact.checkpoint, entry)
        if bad:
            yield Finding(
                "error", "dense-values", name,
                f"{name}: {bad:,} of {entry.parameters:,} numbers are NaN or infinite; fetch or "
                "make the artifact again",
            )  # fmt: skip
        elif empty and len(entry.shape) > 1:
            yield Finding(
                "warning", "dense-values", name,
                f"{name}: every number is 0; the layer does nothing, unless the model has it so",
            )  # fmt: skip


def _look(checkpoint: Checkpoint, entry: Entry) -> tuple[int, bool]:
    """How many numbers are not finite, and whether all are 0; a part in memory at a time."""
    kind, mask = _MASKS[entry.dtype]
    name = entry.stored[0]
    rows = entry.shape[0] if entry.shape else 1
    step = max(1, _AT_ONCE * rows // max(1, entry.nbytes))
    bad, empty = 0, True
    for first in range(0, rows, step):
        raw = (
            checkpoint.part(name, first, min(rows, first + step))
            if entry.shape
            else checkpoint.raw(name)
        )
        words = raw.view(kind)
        bad += int(((words & kind(mask)) == kind(mask)).sum())
        # The sign does not count: -0 is 0.
        empty = empty and not bool((words << kind(1)).any())
    return bad, empty
