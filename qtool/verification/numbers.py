"""Whether the numbers in the quantized matrices can be right."""

from collections.abc import Iterator, Sequence

from qtool.verification.finding import Finding
from qtool.verification.matrix import Measured


def check_scales(matrices: Sequence[Measured]) -> Iterator[Finding]:
    """scales: finite, not zero, positive."""
    for m in matrices:
        name, what = m.entry.name, None
        if m.not_finite:
            what = f"{m.not_finite} of {m.scales} scales are NaN or infinite"
        elif m.zero_scales:
            what = f"{m.zero_scales} of {m.scales} scales are 0"
        elif m.negative:
            what = f"{m.negative} of {m.scales} scales are negative"
        if what:
            yield Finding(
                "error", "scales", name,
                f"{name}: {what}; scales must be finite and positive: quantize this layer anew "
                "with text that reaches it",
            )  # fmt: skip


def check_codes(matrices: Sequence[Measured]) -> Iterator[Finding]:
    """codes: a matrix with a single code holds nothing."""
    for m in matrices:
        if m.low_code == m.high_code:
            name = m.entry.name
            yield Finding(
                "error", "codes", name,
                f"{name}: every code is {m.low_code}, so all that the model knew here is gone; "
                "quantize this layer anew",
            )  # fmt: skip
