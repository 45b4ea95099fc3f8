"""What an error in one matrix costs: see measure.py."""

import hashlib
import json
from collections.abc import Iterator
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
    # Of tables that rows are looked up in, by checkpoint tensor.
    tables: dict[str, Slope] = field(default_factory=dict)
    unrelated: float | None = None  # mean KL divergence of predictions at unrelated places

    def digest(self) -> str:
        """SHA-256 of all slopes, in hexadecimal: the same where every number is."""
        found = hashlib.sha256()
        for named, vectors in self._parts():
            found.update(json.dumps([named, [one.size for one in vectors]]).encode())
            for one in vectors:
                found.update(one.tobytes())
        return found.hexdigest()

    def _parts(self) -> Iterator[tuple[list[str | int], list[Vector]]]:
        for name, every in sorted(self.matrices.items()):
            for number, one in sorted(every.items()):
                yield [name, number, one.count], [one.rows, one.columns]
        if self.head is not None:
            yield ["", self.head.count], [self.head.rows, self.head.columns]
        for name, one in sorted(self.tables.items()):
            yield [name, one.count], [one.rows, one.columns]


def joined(one: Slope, other: Slope) -> Slope:
    """Of a matrix that the network reads at both places."""
    count = one.count + other.count
    sums = one.columns * one.count + other.columns * other.count
    return Slope(one.rows + other.rows, sums / max(1, count), count)
