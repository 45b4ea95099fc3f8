"""One quantized matrix, measured once: the few numbers that every later check looks at."""

from dataclasses import dataclass

import numpy as np

from qtool.artifact import Entry
from qtool.scheme import GroupQuant, Scheme

_LEAST_NORMAL = {"float16": 6.104e-5, "bfloat16": 1.176e-38, "float32": 1.176e-38}


@dataclass(frozen=True)
class Measured:
    """What is in one quantized matrix."""

    entry: Entry
    scheme: Scheme
    scales: int  # how many there are
    not_finite: int  # scales that are NaN or infinite
    zero_scales: int
    negative: int
    subnormal: int  # so small that their type keeps few digits
    low_code: int
    high_code: int


def measure(entry: Entry, quant: GroupQuant) -> Measured:
    """Count in one pass over codes, scales and zeros."""
    scale = quant.scale.astype(np.float32)
    finite = np.isfinite(scale)
    least = np.float32(_LEAST_NORMAL.get(quant.scheme.scale_dtype, 0.0))
    size = np.abs(scale)
    return Measured(
        entry,
        quant.scheme,
        scale.size,
        int(scale.size - finite.sum()),
        int((scale == 0).sum()),
        int((scale < 0).sum()),
        int(((size > 0) & (size < least)).sum()),
        int(quant.codes.min()),
        int(quant.codes.max()),
    )
