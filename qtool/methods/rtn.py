"""Round to nearest: every weight goes to the nearest point of its group's grid. No data needed.

With `clip`, the range of each group is first shrunk to what minimizes its squared error: the
error of the weights alone, or, where a Gram matrix is given, with each column weighted by the
mean square of its input (the diagonal), which is the output error but for correlations.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qtool import grid
from qtool.methods import Result
from qtool.scheme import GroupQuant, Scheme

NEEDS: frozenset[str] = frozenset()


class Stats(Protocol):
    """What is read of an input's statistics."""

    @property
    def gram(self) -> NDArray[np.floating] | None:
        """[in, in], or None where it was not collected."""


@dataclass(frozen=True)
class Options:
    """The recipe's `rtn:` table."""

    clip: bool = False  # shrink each group's range where that lowers the error


def quantize(
    weight: NDArray[np.float32], stats: Stats | None, scheme: Scheme, options: Options
) -> Result:
    """weight [out, in] to codes. Raises UnsupportedError where a scale exceeds float16."""
    if options.clip:
        importance = None
        if stats is not None and stats.gram is not None:
            importance = np.ascontiguousarray(np.diagonal(stats.gram), dtype=np.float32)
        fitted = grid.fit_clipped(weight, scheme, importance)
    else:
        fitted = grid.fit(weight, scheme)
    codes = grid.round_codes(weight, fitted, scheme)
    return Result(GroupQuant(scheme, codes, fitted.scale, fitted.zero))
