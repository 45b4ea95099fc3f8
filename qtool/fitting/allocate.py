"""The cheapest choice of one candidate for each unit that fits into a number of bytes.

A multiple-choice knapsack, solved by dynamic programming over sizes: best[s] is the least loss of
the units so far that take at most s steps of bytes. What there is room for, above the smallest
candidates, is counted in 200,000 steps, and what they take of it is rounded up, so that at most
a step a unit is left unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtool.planning.fitting import STEPS


@dataclass(frozen=True)
class Candidate:
    """One way to store a unit."""

    name: str
    nbytes: int
    loss: float


def allocate(units: Sequence[Sequence[Candidate]], budget: int) -> list[Candidate] | None:
    """A candidate of each unit, in their order; None where the smallest do not fit.

    Of equal losses the smaller candidate is taken, and the earlier one of the list.
    """
    least = [min(candidate.nbytes for candidate in unit) for unit in units]
    room = budget - sum(least)
    if room < 0:
        return None
    steps = min(STEPS, room)
    size = room / steps if steps else 1.0
    best = np.zeros(steps + 1)
    taken = np.zeros((len(units), steps + 1), np.uint8)
    orders = []
    for number, unit in enumerate(units):
        order = sorted(range(len(unit)), key=lambda at: (unit[at].nbytes, unit[at].loss, at))
        orders.append(order)
        found = np.full(steps + 1, np.inf)
        for place, at in enumerate(order):
            cost = _steps(unit[at].nbytes - least[number], size)
            if cost > steps:
                break
            total = best[: steps + 1 - cost] + unit[at].loss
            better = total < found[cost:]
            found[cost:][better] = total[better]
            taken[number, cost:][better] = place
        best = found
    chosen: list[Candidate] = []
    left = steps
    for number in reversed(range(len(units))):
        candidate = units[number][orders[number][taken[number, left]]]
        left -= _steps(candidate.nbytes - least[number], size)
        chosen.append(candidate)
    return chosen[::-1]


def _steps(nbytes: int, size: float) -> int:
    """Rounded up."""
    return int(np.ceil(nbytes / size - 1e-9))
