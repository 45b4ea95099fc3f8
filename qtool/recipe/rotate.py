"""The `rotate:` table of a recipe: which rotations, and how they are found."""

from typing import Literal

from pydantic import Field

from qtool.recipe.file import Table


class RotateOptions(Table):
    """Rotations, so that no channel stands out: r1 and r2 are absorbed by the weights."""

    kind: Literal["hadamard", "random", "learned"] = Field(
        default="hadamard",
        description="hadamard, with random signs; random orthogonal; or learned on the calibration "
        "samples, from the Hadamard matrix on",
    )
    r1: bool = Field(default=True, description="R1: rotate the residual stream")
    r2: bool = Field(default=True, description="R2: rotate each head's values")
    r3: bool = Field(
        default=False, description="R3: rotate queries and keys of each head while the model runs"
    )
    r4: bool = Field(
        default=False,
        description="R4: rotate the inputs of the MLP's last matrix while the model runs",
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    steps: int = Field(default=60, ge=1, le=10_000, description="of learning")
    rate: float = Field(default=5.0, gt=0, le=100, description="of learning, at its beginning")

    @property
    def online(self) -> bool:
        """Whether the engine has to rotate, too."""
        return self.r3 or self.r4

    @property
    def some(self) -> bool:
        """Whether anything is rotated."""
        return self.r1 or self.r2 or self.online
