"""What an error in one matrix costs: see slopes.py."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Slope:
    """Of one matrix: loss = 1/2 sum of rows[o] * columns[k] * error[o, k]^2, in nats a token."""

    rows: Vector  # [out]
    columns: Vector  # [in]
    count: int  # tokens that it read


@dataclass
class Slopes:
    """Of a model."""

    # By checkpoint tensor, then by the expert's number where one tensor holds all, or -1.
    matrices: dict[str, dict[int, Slope]] = field(default_factory=dict)
    head: Slope | None = None
    # Of tables that rows are looked up in, by checkpoint tensor: columns, over the text's tokens.
    tables: dict[str, Vector] = field(default_factory=dict)


def joined(one: Slope, other: Slope) -> Slope:
    """Of a matrix that the network reads at both places."""
    count = one.count + other.count
    sums = one.columns * one.count + other.columns * other.count
    return Slope(one.rows + other.rows, sums / max(1, count), count)
