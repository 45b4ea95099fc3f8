"""The tables `rtn`, `gptq`, `awq` and `tune` of a recipe: how the methods of these names work."""

from typing import Literal

from pydantic import Field

from qtool.recipe.file import Table


class RtnOptions(Table):
    """Round to nearest."""

    clip: bool = Field(default=False, description="shrink each group's range to the least error")


class SweepOptions(Table):
    """GPTQ's sweep over the columns of a matrix."""

    act_order: bool = Field(default=True, description="quantize the most excited columns first")
    damp_percent: float = Field(
        default=0.01, gt=0, le=1, description="of the mean diagonal, added to the diagonal"
    )
    token_damping: bool = Field(
        default=True, description="add in_features / calibration tokens to damp_percent"
    )
    gptaq: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="GPTAQ: the part of what earlier blocks have lost that matrices compensate for",
    )
    guided: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="keys and values: tokens count by what others read of them, to this power",
    )
    yaqa: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="YAQA: rows compensate for each other, by gradients over so many samples",
    )


class GptqOptions(SweepOptions):
    """GPTQ's rounding, and the GPTQ layout."""

    static_groups: bool = Field(
        default=True, description="groups stay runs of neighbours, so that g_idx is k // group_size"
    )
    mse: bool = Field(default=True, description="search each group's range for the least error")
    layout: Literal["v1", "v2"] | None = Field(
        default=None, description="of format gptq; default: v1 when symmetric, else v2"
    )


class AwqOptions(Table):
    """AWQ's scale search and clipping, and the AWQ layout."""

    grid: int = Field(default=20, ge=1, le=1000, description="exponents tried from 0 to 1")
    clip: bool = Field(default=True, description="search each group's range for the least error")
    layout: Literal["gemm", "gemv", "gemv_fast", "llm_awq"] = Field(
        default="gemm", description="of format awq; engines load gemm"
    )


class TuneOptions(Table):
    """Scales moved down the gradient of a block's error, once all else is done."""

    steps: int = Field(default=60, ge=1, le=100_000, description="of Adam, for each block")
    batch: int = Field(
        default=2, ge=1, le=1024, description="micro-batches of about 1024 tokens in a step"
    )
    rate: float = Field(
        default=0.003, gt=0, le=0.1, description="of the first step, relative to each scale"
    )
