"""Plans of GGUF files."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qtool.gguf.source import GgufSource
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.planning.gguf.planned import GgufPlan
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load


@dataclass(frozen=True)
class Measured:
    """Importance of a model."""

    entries: dict[str, NDArray[np.float32]]
    file: str | None = "imatrix.gguf"
    datasets: tuple[str, ...] = ("text.txt", "other.txt")
    chunks: int = 7
    calibration: str | None = None

    @staticmethod
    def of(model: GgufSource, **more: object) -> "Measured":
        """Of all matrices in blocks."""
        entries = {
            t.name: np.ones((t.shape[0] if len(t.shape) > 2 else 1, t.in_features), np.float32)
            for t in model.tensors
            if len(t.shape) > 1 and t.name.startswith("blk.")
        }
        return replace(Measured(entries), **more)  # type: ignore[arg-type]


def recipe_of(name: str, *sets: str) -> GgufRecipe:
    found = load(name, sets)
    assert isinstance(found, GgufRecipe)
    return found


def plan_of(model: GgufSource, name: str, *sets: str, **more: object) -> GgufPlan:
    return make_gguf_plan(recipe_of(name, *sets), model, **more)  # type: ignore[arg-type]
