"""How large an input may be before it is cut off, for a scale that is stored.

    minmax        the largest |x| that was seen
    percentile    the |x| that so many percent of all numbers do not exceed
    mse           the one of 80 fractions of the largest |x| with the least squared error, over all
                  numbers, when they are rounded to the codes that the scale gives

The last two look at a histogram of |x| whose bins are float32 numbers that agree in the exponent
and in the first 8 bits of the fraction: 256 bins for each power of two, the same for every input,
so that counts of micro-batches just add up.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

BINS = 1 << 16
_SHIFT = 15  # bits of a float32 that a bin does not look at
_FRACTIONS = np.arange(21, 101) / 100


def counts(x: torch.Tensor) -> torch.Tensor:
    """Histogram of |x|, int64 [BINS]."""
    bits = x.abs().contiguous().view(torch.int32) >> _SHIFT
    return torch.bincount(bits.reshape(-1), minlength=BINS)


def _edges(bins: NDArray[np.int64]) -> NDArray[np.float32]:
    return (bins << _SHIFT).astype(np.uint32).view(np.float32)


def percentile(histogram: NDArray[np.int64], percent: float) -> float:
    """The upper end of the bin in which the number of that rank lies."""
    total = np.cumsum(histogram)
    place = int(np.searchsorted(total, total[-1] * (percent / 100)))
    return float(_edges(np.array([min(place, BINS - 2) + 1], np.int64))[0])


def least_squares(
    histogram: NDArray[np.int64],
    largest: float,
    rounded: Callable[[float, torch.Tensor], torch.Tensor],
) -> float:
    """rounded(limit, x): x with the scale of that limit."""
    bins = np.flatnonzero(histogram)
    middle = (_edges(bins) + _edges(np.minimum(bins + 1, BINS - 1))) / 2
    x, weight = torch.from_numpy(middle), torch.from_numpy(histogram[bins]).double()
    limits = [largest * float(fraction) for fraction in _FRACTIONS]
    errors = [float(((rounded(limit, x) - x).double().square() * weight).sum()) for limit in limits]
    # The largest of equals: nothing is cut off for no gain.
    return limits[len(errors) - 1 - int(np.argmin(errors[::-1]))]
