"""The `rotate:` table of a recipe: which rotations, and how they are found."""

from typing import Literal

from pydantic import Field

from qtool.recipe.file import Table


class RotateOptions(Table):
    """Rotations that are absorbed by the weights, so that no channel stands out."""

    kind: Literal["hadamard", "random", "learned"] = Field(
        default="hadamard",
        description="hadamard, with random signs; random orthogonal; or learned on the calibration "
        "samples, from the Hadamard matrix on",
    )
    r1: bool = Field(default=True, description="turn the residual stream")
    r2: bool = Field(default=True, description="turn each head's values")
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    steps: int = Field(default=60, ge=1, le=10_000, description="of learning")
    rate: float = Field(default=5.0, gt=0, le=100, description="of learning, at its beginning")
