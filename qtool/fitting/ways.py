"""A model and a recipe as far as a choice is concerned, whatever the format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.gradients.sensitivity import Sensitivities
from qtool.messages.progress import Progress
from qtool.planning.fitting import Fitting
from qtool.streaming.weights import Weights
from qtool.streaming.workers import Workers

# By unit, then by choice, in nats a token; None where a choice cannot hold the unit.
Losses = Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class Made:
    """What a recipe makes, by its plan."""

    size_bytes: int  # at most, where something is yet to be measured
    tensor_bytes: int
    numbers: int  # of the model

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.tensor_bytes / self.numbers


@dataclass(frozen=True)
class Ways:
    """What is to be chosen, and what comes of it. A unit is a tensor, or some that go together."""

    weights: Weights  # the model to run
    sizes: Mapping[str, Mapping[str, int]]  # by unit, then by choice, in bytes
    members: Mapping[str, int]  # of a unit: how many tensors
    before: Made  # of the recipe as it is
    chosen_before: Mapping[str, tuple[str, int]]  # of each unit, and its bytes
    tokens: Callable[
        [Progress], tuple[NDArray[np.int64], Mapping[str, Any]]
    ]  # to measure over; a record
    losses: Callable[
        [str, Sensitivities, Workers], Mapping[str, float | None]
    ]  # of a unit, by choice;
    # none where it could not be measured
    text: Callable[[str, Mapping[str, str]], str]  # first line, choices: the recipe
    made: Callable[[str], Made]  # of such a text
    facts: Mapping[str, Any]  # what losses hang on, beside the model and the text
    fitting: Fitting  # what that takes of memory
    unit: str  # what a person calls one
    notes: tuple[str, ...] = ()
    # By unit, of what rounding it to nearest loses: what remains by the methods that come later.
    remains: Mapping[str, float] = field(default_factory=dict)


def said_by(given: Mapping[str, str]) -> list[str]:
    """A sentence on matrices, by name, whose type is not chosen since the recipe says it."""
    if not given:
        return []
    named = [f"{name} {kind.lower()}" for name, kind in given.items()]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return [f"as the recipe itself says, and not chosen: {', '.join(named[:3])}{more}"]
