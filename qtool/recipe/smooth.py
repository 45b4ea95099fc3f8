"""The parts of a recipe that say how inputs are smoothed: `smooth`, `smooth_attention`.

transforms: [smooth, smooth-attention]
smooth:
  alpha: 0.5           # or search
  sites: norms         # or all
smooth_attention:
  alpha: 0.5
"""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from qtool.recipe.file import Table


class SmoothOptions(Table):
    """SmoothQuant: scales between activations and weights."""

    alpha: float | Literal["search"] = Field(
        default=0.5, description="0 to 1: how much weights take over; or search, input by input"
    )
    sites: Literal["norms", "all"] = Field(
        default="norms", description="all: inputs too that an earlier matrix makes"
    )
    grid: int = Field(default=20, ge=1, le=1000, description="steps from 0 to 1 that search tries")

    @field_validator("alpha")
    @classmethod
    def between(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and not 0 <= value <= 1:
            raise PydanticCustomError("alpha", "expected a number from 0 to 1, or search", {})
        return value


class SmoothAttentionOptions(Table):
    """SmoothAttention: scales between queries and keys, for a cache of few bits."""

    alpha: float = Field(default=0.5, ge=0, le=1, description="how much queries take over")
