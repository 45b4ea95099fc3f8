"""Matrices that were pruned to the pattern that GPUs multiply faster: of each four neighbours in a
row two are 0, or more. What is left was changed to compensate for it, so that how far it is from
the source tells nothing of rounding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.finding import Finding

_ALL = 0.999  # of the fours
_FOUR = 4


@dataclass(frozen=True)
class Fours:
    """What is counted of a matrix, some rows after the other."""

    count: int = 0
    half: int = 0  # of which two are 0, or more
    other: bool = False  # rows of another width
    any: bool = False  # number that is not 0

    def with_rows(self, values: NDArray[np.float32]) -> "Fours":
        """With rows [out, in] more."""
        if values.ndim != 2 or values.shape[1] % _FOUR:
            return replace(self, other=True)
        fours = np.ascontiguousarray(values == 0).reshape(-1).view(np.uint32)
        zeros = (fours * np.uint32(0x01010101)) >> np.uint32(24)  # the sum of the four bytes
        half = self.half + int((zeros >= _FOUR // 2).sum())
        some = self.any or bool((zeros < _FOUR).any())
        return Fours(self.count + zeros.size, half, self.other, some)

    def is_not_of(self, weights: int) -> bool:
        """Whether a matrix of so many weights cannot have the pattern, whatever comes."""
        return self.other or self.count - self.half > (1 - _ALL) * (weights // _FOUR)

    @property
    def pruned(self) -> bool:
        """Whether the matrix has the pattern, and is not 0 altogether."""
        return self.any and not self.other and self.half >= _ALL * self.count


def is_pruned(values: NDArray[np.float32]) -> bool:
    """Whether values [out, in] have the pattern, and are not 0 altogether."""
    return Fours().with_rows(values).pruned


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
