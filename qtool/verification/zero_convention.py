"""Whether zeros are stored as their label says: by the codes alone."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from qtool.artifacts.artifact import Artifact
from qtool.messages.sentences import AGAIN, some
from qtool.verification.finding import Finding
from qtool.verification.matrix import Measured

_OFF_BY_ONE = 0.3  # how far from 1 the mean of code - zero may be to mean that
_FEW_WEIGHTS = 4096  # too few to tell anything from means
_COARSE = 4  # bits, of which one step is more than means of weights are off by themselves
_SURELY = 6  # standard errors
_FEW_MATRICES = 3  # which may by chance have weights that are not about 0


def check_convention(artifact: Artifact, matrices: Sequence[Measured]) -> Iterator[Finding]:
    """zero-convention: v1 files hold zeros less one, v2 files and AWQ hold them as they are.

    Symmetric zeros give themselves away. Otherwise the mean of code - zero does: weights are about
    as often positive as negative, so it is near 0; read by the wrong convention it is off by one.
    Of more than four bits a step is so small that the mean of a sound matrix may be as far off:
    then all of them together must be.
    """
    label = str(artifact.found.layout or artifact.found.format)
    whole = sum(m.zeros is not None for m in matrices)
    for found, truth, few in other_zeros(matrices):
        if artifact.found.format == "gptq" and truth != label:
            key, names = "checkpoint_format", {"v1": "gptq", "v2": "gptq_v2"}
            if artifact.found.quant_method == "auto-round":
                key, names = "packing_format", {"v1": "auto_round:auto_gptq", "v2": "auto_round"}
            fix = (
                f"the label says {names.get(label, label)}, the zeros are {names[truth]}'s: set "
                f"{key} to {names[truth]}"
            )
        else:
            fix = "they were written by another convention: make the artifact again"
        what, wrong = "zeros", "off by one as they are labelled, which makes"
        if found[0].scheme.outer == "offset":
            what, fix = "biases", AGAIN
            wrong = "off by one scale, which makes"
        of = "all" if len(found) == whole else f"{len(found)} of {whole}"
        yield Finding(
            "warning" if few else "error", "zero-convention", found[0].entry.name,
            f"the {what} of {of} matrices ({some([m.entry.name for m in found])}) are {wrong} "
            f"every weight wrong by a step; {fix}",
        )  # fmt: skip


def other_zeros(
    matrices: Sequence[Measured],
) -> Iterator[tuple[list[Measured], str, bool]]:
    """Matrices whose zeros are not as they are labelled, with the version of GPTQ that they are of,
    and whether they are so few that chance may explain it."""
    whole = [m for m in matrices if m.zeros is not None]
    middle = [m for m in whole if m.zeros and m.zeros.v1_stores_middle]
    less = [
        m for m in whole
        if m.scheme.symmetric and m.zeros and m.zeros.most == (1 << (m.scheme.bits - 1)) - 1
    ]  # fmt: skip
    told = [m for m in whole if not m.scheme.symmetric and _tells(m)]
    high, low = _shifted(told, -1), _shifted(told, 1)
    for found, truth in ((middle, "v2"), (high, "v2"), (less, "v1"), (low, "v1")):
        guessed = found is high or found is low
        few = guessed and 2 * len(found) < len(whole) and len(found) < _FEW_MATRICES
        if found:
            yield found, truth, few


def _tells(m: Measured) -> bool:
    """Whether the mean of code - zero says anything."""
    return m.zeros is not None and m.entry.parameters >= _FEW_WEIGHTS and not m.zeros.at_ends


def _shifted(matrices: Sequence[Measured], by: int) -> list[Measured]:
    """Those whose mean of code - zero is off by this many steps, as far as can be told."""
    means = {m.entry.name: m.zeros.offset for m in matrices if m.zeros}
    coarse = [m for m in matrices if m.scheme.bits <= _COARSE]
    found = [m for m in coarse if abs(means[m.entry.name] - by) <= _OFF_BY_ONE]
    fine = [m for m in matrices if m.scheme.bits > _COARSE]
    if len(fine) < _FEW_MATRICES:
        return found
    all_ = np.array([means[m.entry.name] for m in fine])
    chance = all_.std(ddof=1) / math.sqrt(len(fine))
    if abs(all_.mean() - by) <= _OFF_BY_ONE and abs(all_.mean()) > _SURELY * chance:
        found += fine
    return found
