"""The unquantized tensors: finite, and not wiped out."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qtool.artifacts.entry import Entry
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.holes import EMPTY, is_bias, said_torn, torn, zero_stretches
from qtool.checkpoints.roles import outside_reason
from qtool.formats import mxfp4_experts
from qtool.formats.safetensors_header import TensorInfo
from qtool.messages.sentences import AGAIN, FETCH
from qtool.verification.finding import Finding, Severity
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
        checkpoint = subject.artifact.checkpoint
        looked = _look(checkpoint, checkpoint.tensors[entry.stored[0]])
        bad = looked.bad
        if bad and not _bounds_nothing(subject.artifact.checkpoint, entry):
            yield Finding(
                "error", "dense-values", name,
                f"{name}: {bad:,} of {entry.parameters:,} numbers are NaN or infinite; fetch or "
                "make the artifact again",
            )  # fmt: skip
            continue
        role = subject.roles.get(name)
        per_token = role is not None and role.reason in _PER_TOKEN
        if (found := _emptied(checkpoint, name, entry.shape, looked, per_token, AGAIN)) is not None:
            yield Finding(found[0], "dense-values", name, f"{name}: {found[1]}")


def emptied(checkpoint: Checkpoint, name: str) -> str | None:
    """What of a model's tensor is 0, as where a download was not ended, as a sentence goes on after
    its name; None where nothing is."""
    info = checkpoint.tensors[name]
    if info.dtype not in _MASKS or not info.size:
        return None
    looked, per_token = _look(checkpoint, info), outside_reason(name) in _PER_TOKEN
    found = _emptied(checkpoint, name, info.shape, looked, per_token, FETCH)
    return None if found is None else found[1]


def _emptied(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    looked: "_Looked",
    per_token: bool,
    again: str,
) -> tuple[Severity, str] | None:
    """How bad it is, and how a sentence goes on after the name. per_token: it has a row for each
    token."""
    if looked.empty and len(shape) > 1 and not is_bias(name):
        return "warning", EMPTY
    if looked.hole and _of_weights(name, shape):
        return "error", said_torn(looked.hole, again)
    if looked.rows and per_token:
        tokens = tokens_of(checkpoint.folder) or shape[0]
        known = sum(row < tokens for row in looked.rows)
        if known > max(_FEW_ROWS, _FEW_OF_ROWS * tokens):
            return (
                "warning",
                f"the rows of {known:,} of {tokens:,} tokens are 0; unless the model has it so, "
                f"{again}",
            )
    return None


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


def _of_weights(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is a matrix or a stack of them; masks and tables may hold any stretch of 0."""
    return len(shape) > 1 and (name.endswith(".weight") or "experts" in name)


@dataclass(frozen=True)
class _Looked:
    """What is in a tensor of floats."""

    bad: int  # numbers that are not finite
    empty: bool  # whether all are 0
    hole: int  # bytes in torn rows
    rows: list[int]  # those in long stretches of 0


def _look(checkpoint: Checkpoint, info: TensorInfo) -> _Looked:
    """A part in memory at a time."""
    kind, mask = _MASKS[info.dtype]
    name = info.name
    rows = info.shape[0] if info.shape else 1
    step = max(1, _AT_ONCE * rows // max(1, info.nbytes))
    bad, empty = 0, True
    width = info.nbytes // max(1, info.size // max(1, info.shape[-1])) if rows > 1 else 0
    hole, zeros = 0, list[int]()
    for first in range(0, rows, step):
        raw = (
            checkpoint.part(name, first, min(rows, first + step))
            if info.shape
            else checkpoint.raw(name)
        )
        words = raw.view(kind)
        bad += int(((words & kind(mask)) == kind(mask)).sum())
        # The sign does not count: -0 is 0.
        empty = empty and not bool((words << kind(1)).any())
        if width and len(info.shape) > 1:
            stretches = zero_stretches(raw.reshape(-1))
            hole += torn(raw.reshape(-1), stretches, width)
            for start, end in stretches:
                zeros += range(first + -(-start // width), first + end // width)
    return _Looked(bad, empty, hole, zeros)
