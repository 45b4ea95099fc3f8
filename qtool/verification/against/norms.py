"""Norms that are zeros, or the source's but for one factor, where no layer makes up for that.

Scales that were folded into a norm (AWQ, SmoothQuant) are other ones in each channel, and its
readers have the inverse (see `folds`). A single factor that nothing undoes changes what the model
computes as much as it likes, and no matrix shows it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qtool.formats.dtypes import FLOAT_DTYPES
from qtool.verification.against.fit import MATCH, uneven
from qtool.verification.against.folds import PLUS_ONE, block_of
from qtool.verification.against.scaling import Compared
from qtool.verification.against.side_by_side import Floats
from qtool.verification.finding import Finding
from qtool.verification.sentences import AGAIN, some, verb
from qtool.verification.sentences import count as counted
from qtool.verification.subject import Subject

CHECK = "norms"
_FACTOR = 1.5  # and its inverse: smaller ones may be a fold that coarse codes do not show


def check_norms(
    subject: Subject, compared: Sequence[Compared], norms: Mapping[str, Mapping[str, Floats]]
) -> Iterator[Finding]:
    """norms: none is 0 altogether, or a multiple of the source's that nothing takes back.

    norms: old / new weight of those that differ, by block (folds.changed_norms).
    """
    zeros, times = [], []
    folded: dict[str, bool] = defaultdict(bool)
    for c in compared:
        folded[block_of(subject, c.name)] |= c.columns is not None or c.rows is not None
    for block, ratios in norms.items():
        for name, ratio in ratios.items():
            if name.endswith(PLUS_ONE):
                continue
            if _is_zero(subject, name):
                zeros.append(name)
                continue
            factor = 1 / float(np.median(ratio))
            even = uneven(ratio) <= MATCH and not 1 / _FACTOR < factor < _FACTOR
            if even and not folded[block]:
                times.append(f"{name} ({factor:.3g} times)")
    for names, what in (
        (zeros, "0 altogether, and not so in the source"),
        (times, "the source's but for a factor that no layer makes up for"),
    ):
        if names:
            yield Finding(
                "error", CHECK, names[0].split(" ")[0],
                f"{counted(len(names), 'norm')} {verb(len(names), 'are', 'is')} {what}: "
                f"{some(names)}; {AGAIN}",
            )  # fmt: skip


def _is_zero(subject: Subject, name: str) -> bool:
    """Whether a vector of floats has nothing but zeros."""
    entry = subject.entries[name]
    if entry.dtype not in FLOAT_DTYPES:
        return False
    return not subject.artifact.checkpoint.float32(entry.stored[0]).any()
