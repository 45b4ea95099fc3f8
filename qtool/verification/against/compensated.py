"""Matrices that GPTAQ moved before they were rounded: as far as rounding went before them, whatever
their own bits."""

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.messages.sentences import count as counted
from qtool.verification.finding import Finding

FARTHEST = 0.5  # relative: beyond it a matrix is another one, also of a model of 2 bits


def compensates(recipe: object) -> bool:
    """Whether a recorded recipe has gptq.gptaq."""
    table: Any = recipe.get("gptq") if isinstance(recipe, Mapping) else None
    part = table.get("gptaq") if isinstance(table, Mapping) else None
    return isinstance(part, int | float) and part > 0


def told(check: str, far: Sequence[tuple[str, float]]) -> list[Finding]:
    """A note of matrices, by name and relative error, that are farther from the source than their
    own rounding explains."""
    if not far:
        return []
    name, error = max(far, key=lambda one: one[1])
    return [
        Finding(
            "note", check, name,
            f"{counted(len(far), 'matrix')} farther from the source than rounding explains, since "
            f"they compensate for what was lost before them (gptq.gptaq): {name} by {error:.1%}",
        )
    ]  # fmt: skip
