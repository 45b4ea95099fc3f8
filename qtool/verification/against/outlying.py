"""Rows of the source that are far larger than all others, where the artifact is wrong there.

Scales that such a row shares with others, as a fold's do, cannot hold both: whatever is made of
that model is wrong again.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from qtool.formats.safetensors_file import FLOAT_DTYPES
from qtool.messages.sentences import FETCH
from qtool.streaming.weights import rows_of
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

_TIMES = 1e4  # the largest rows of trained models are some hundred times as large as most
_AT_ONCE = 1 << 22  # weights


def told(check: str, subject: Subject, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Of the matrices that errors name."""
    source = subject.source
    errors = [finding.message for finding in findings if finding.severity == "error"]
    if source is None or not errors:
        return
    for name, info in source.tensors.items():
        named = name in subject.entries and any(name in message for message in errors)
        if not named or len(info.shape) != 2 or info.dtype not in FLOAT_DTYPES or not info.size:
            continue
        rows, step = rows_of(source, name), max(1, _AT_ONCE // info.shape[1])
        parts = (rows(at, min(info.shape[0], at + step)) for at in range(0, info.shape[0], step))
        tops = np.concatenate([np.abs(part).max(axis=1) for part in parts])
        usual, row = float(np.median(tops)), int(tops.argmax())
        if usual > 0 and tops[row] > _TIMES * usual:
            yield Finding(
                "warning", check, name,
                f"{name}: row {row} of the source is {tops[row] / usual:,.0f} times as large as "
                "most of its rows, which no training makes; an artifact made again is no better: "
                f"{FETCH}",
            )  # fmt: skip
