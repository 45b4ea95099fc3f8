"""One factor between a matrix and its source: all of its scales were multiplied by it, or stand for
their reciprocals. Whether anything compensates for it is judged in `multiples`."""

import math

import numpy as np

from qtool.scheme import GroupQuant
from qtool.verification.against.compared import Multiple
from qtool.verification.against.fit import MATCH, Fit, uneven
from qtool.verification.against.side_by_side import Floats

_EVEN = MATCH / 2  # of the logarithm: the scales of rows that are one factor
LEAST = 0.03  # of the logarithm: nearer to 1, it is what clipping and casting leave
WORTH = 1.5  # times the error without the factor: GPTQ makes 1, of two bits, too
RECIPROCALS = math.inf  # in place of a factor


def multiple_of(found: Fit | None) -> Multiple | None:
    """What the scales of rows [out] say; None where they are no factor, or none that is sure."""
    if found is None or found.rows is None or uneven(found.rows) > _EVEN:
        return None
    times = float(np.median(found.rows))
    if (found.columns is not None and found.norm is None) or abs(math.log(times)) < LEAST:
        return None
    if found.without_rows <= WORTH * found.left / times:
        return None
    return Multiple(times, found.without_rows > WORTH * found.left / min(times, 1.0))


def are_reciprocals(quant: GroupQuant, groups: Floats) -> bool:
    """Whether the codes need 1 / scale for each scale. groups: the sums of `likeness`."""
    if quant.scheme.outer in ("offset", "rows"):
        return False
    whole, shared, lost = groups[:3].astype(np.float64)
    by = 1 / np.square(quant.rows(slice(None)).scale.astype(np.float64))
    left = float((whole - 2 * by * shared + by * by * (lost + 2 * shared - whole)).sum())
    return 0 <= left < min(float(lost.sum()), float(whole.sum())) / WORTH**2
