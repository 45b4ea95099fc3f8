"""Artifacts side by side: which of them no other beats in both size and quality."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qtool.quality.evaluate import Evaluation


def unbeaten(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of (size, divergence): those for which every other is larger, or has a higher divergence.

    What is not finite is beaten, and beats nothing.
    """

    def beats(other: tuple[float, float], one: tuple[float, float]) -> bool:
        return other[0] <= one[0] and other[1] <= one[1] and other != one

    return [
        math.isfinite(one[1]) and not any(beats(other, one) for other in points) for one in points
    ]


def front(found: Sequence["Evaluation"]) -> set[str]:
    """Names of those that none of the others beats."""
    best = unbeaten([(one.size_bytes, kld(one)) for one in found])
    return {one.artifact for one, good in zip(found, best, strict=True) if good}


def kld(one: "Evaluation") -> float:
    """Its mean KL divergence, nats."""
    return float(one.found["kld"]["mean"])
