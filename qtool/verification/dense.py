"""The unquantized tensors: finite, and not wiped out."""

from collections.abc import Iterator

import numpy as np

from qtool.artifacts.entry import Entry
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats import mxfp4_experts
from qtool.verification.finding import Finding
from qtool.verification.holes import torn, zero_stretches
from qtool.verification.subject import Subject
from qtool.verification.tokens import tokens_of

_PER_TOKEN = ("embedding", "output head")
_FEW_ROWS, _FEW_OF_ROWS = 16, 0.01  # of the tokens: those that stand for padding, or are kept free
_AT_ONCE = 1 << 24  # bytes
# By dtype: what the bits of a number are masked with, and what is left of NaN and infinity.
_MASKS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}


def check_dense(subject: Subject) -> Iterator[Finding]:
    """dense-values: of every tensor that is stored as floats, or read as them."""
    for name, entry in subject.entries.items():
        released = entry.stacked and entry.stored[1].endswith(mxfp4_experts.SCALES)
        if released and (lost := _no_scales(subject.artifact.checkpoint, entry)):
            yield Finding(
                "error", "dense-values", name,
                f"{entry.stored[1]}: {lost:,} of {entry.parameters // mxfp4_experts.GROUP:,} "
                "scales are NaN; fetch or make the artifact again",
            )  # fmt: skip
        if entry.scheme is not None or entry.dtype not in _MASKS or not entry.parameters:
            continue
        bad, empty, hole, rows = _look(subject.artifact.checkpoint, entry)
        if bad and not _bounds_nothing(subject.artifact.checkpoint, entry):
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
        elif hole and _of_weights(entry):
            yield Finding(
                "error", "dense-values", name,
                f"{name}: {hole:,} bytes are 0 in long stretches that begin or end within a row: "
                "it was not written or fetched to its end; fetch or make the artifact again",
            )  # fmt: skip
        elif rows and subject.roles.get(name) and subject.roles[name].reason in _PER_TOKEN:
            tokens = tokens_of(subject.artifact.checkpoint.folder) or entry.shape[0]
            known = sum(row < tokens for row in rows)
            if known > max(_FEW_ROWS, _FEW_OF_ROWS * tokens):
                yield Finding(
                    "warning", "dense-values", name,
                    f"{name}: the rows of {known:,} of {tokens:,} tokens are 0; unless the model "
                    "has it so, fetch or make the artifact again",
                )  # fmt: skip


def _no_scales(checkpoint: Checkpoint, entry: Entry) -> int:
    """How many scales of stacked experts are no numbers."""
    experts = range(entry.shape[0])
    parts = (checkpoint.part(entry.stored[1], one, one + 1) for one in experts)
    return sum(int((part == mxfp4_experts.NAN).sum()) for part in parts)


def _bounds_nothing(checkpoint: Checkpoint, entry: Entry) -> bool:
    """Whether it is a bound of activations at infinity, which is none: Gemma 4 stores such."""
    if entry.parameters != 1 or not entry.name.endswith(("_min", "_max")):
        return False
    return bool(np.isinf(checkpoint.float32(entry.stored[0])).all())


def _of_weights(entry: Entry) -> bool:
    """Whether it is a matrix or a stack of them; masks and tables may hold any stretch of 0."""
    return len(entry.shape) > 1 and (entry.name.endswith(".weight") or "experts" in entry.name)


def _look(checkpoint: Checkpoint, entry: Entry) -> tuple[int, bool, int, list[int]]:
    """How many numbers are not finite, whether all are 0, how many bytes are in holes, and the
    rows in long stretches of 0; a part in memory at a time."""
    kind, mask = _MASKS[entry.dtype]
    name = entry.stored[0]
    rows = entry.shape[0] if entry.shape else 1
    step = max(1, _AT_ONCE * rows // max(1, entry.nbytes))
    bad, empty = 0, True
    width = entry.nbytes // max(1, entry.parameters // max(1, entry.shape[-1])) if rows > 1 else 0
    hole, zeros = 0, list[int]()
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
        if width and len(entry.shape) > 1:
            stretches = zero_stretches(raw.reshape(-1))
            hole += torn(raw.reshape(-1), stretches, width)
            for start, end in stretches:
                zeros += range(first + -(-start // width), first + end // width)
    return bad, empty, hole, zeros
