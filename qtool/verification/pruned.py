"""Matrices that were pruned to the pattern that GPUs multiply faster: of each four neighbours in a
row two are 0, or more. What is left was changed to make up for it, so that how far it is from the
source tells nothing of rounding."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qtool.verification.finding import Finding
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some

_ALL = 0.999  # of the fours
_FOUR = 4


def is_pruned(values: NDArray[np.float32]) -> bool:
    """Whether values [out, in] have the pattern, and are not 0 altogether."""
    if values.ndim != 2 or values.shape[1] % _FOUR or not values.any():
        return False
    zeros = (values == 0).reshape(len(values), -1, _FOUR).sum(axis=2)
    return bool((2 * zeros >= _FOUR).mean() >= _ALL)


def told(check: str, names: Sequence[str]) -> list[Finding]:
    """The note of them; none where there are none."""
    if not names:
        return []
    return [
        Finding(
            "note", check, names[0],
            f"{counted(len(names), 'matrix')} pruned (of each four weights two are 0), which the "
            f"source's are not: {some(names)}; how far they are from it was not judged",
        )
    ]  # fmt: skip
