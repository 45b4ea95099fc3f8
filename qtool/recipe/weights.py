"""The part of a recipe that says how numbers are stored: `weights`, `activations`, `kv_cache`,
`overrides`.

weights:
  type: fp8            # int (the default), fp8, mxfp8, nvfp4 or mxfp4
  bits: 8
  group_size: 128
  symmetric: true
  rows: 128            # with fp8: output features that share a scale; -1 is all of them
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qtool.recipe.file import Table
from qtool.scheme import Scheme

NumberType = Literal["int", "fp8", "mxfp8", "nvfp4", "mxfp4"]
# Of the types whose groups are fixed: bits, group_size, and what scales are stored in.
_FIXED = {"mxfp8": (8, 32, "e8m0"), "nvfp4": (4, 16, "float8_e4m3"), "mxfp4": (4, 32, "e8m0")}


def _group_size(value: int | None) -> int | None:
    if value is not None and value != -1 and (value < 16 or value % 8):
        raise PydanticCustomError(
            "group_size",
            "expected -1 (one group per output channel) or a multiple of 8 from 16 on; "
            "engines load -1, 32, 64 and 128",
            {},
        )
    return value


def _no_e5m2(value: object) -> object:
    if isinstance(value, str) and "e5m2" in value.lower():
        raise PydanticCustomError(
            "type",
            "float8_e5m2 is in no format that engines load: their FP8 weights, inputs and stored "
            "scales of the KV cache are float8_e4m3 (vLLM's --kv-cache-dtype fp8_e5m2 wants an "
            "artifact without such scales)",
            {},
        )
    return value


class Weights(Table):
    """Bits of a weight, input features that share a scale, and whether zero is in the middle."""

    bits: int = Field(ge=2, le=8)
    group_size: int = Field(description="input features per scale; -1: one per output channel")
    symmetric: bool
    type: NumberType = Field(default="int", description="what codes stand for")
    rows: int = Field(
        default=1,
        ge=-1,
        description="of fp8: output features per scale; -1: all of them, of int too",
    )

    check_group = field_validator("group_size")(_group_size)
    check_type = field_validator("type", mode="before")(_no_e5m2)

    @model_validator(mode="after")
    def consistent(self) -> "Weights":
        whole = self.rows == -1 == self.group_size and self.symmetric
        if self.type == "int" and self.rows != 1 and not whole:
            raise PydanticCustomError(
                "rows",
                "int has one scale a row; or one for the matrix: rows -1, group_size -1, symmetric",
                {},
            )
        if self.rows == 0:
            raise PydanticCustomError("rows", "rows is 0; expected 1, -1 or a block's height", {})
        if self.type == "int":
            return self
        bits, size, _ = _FIXED.get(self.type, (8, self.group_size, ""))
        wanted = {"bits": bits, "group_size": size, "symmetric": True}
        if self.type in _FIXED:
            wanted["rows"] = 1
        for key, value in wanted.items():
            if getattr(self, key) != value:
                raise PydanticCustomError(
                    "type", f"type {self.type} has {key} {str(value).lower()}", {}
                )
        if self.type == "fp8" and (self.rows > 1) != (self.group_size > 0):
            raise PydanticCustomError(
                "rows",
                "fp8 has one scale a row (rows 1, group_size -1), one for the matrix (rows -1, "
                "group_size -1), or one a block (rows and group_size 128)",
                {},
            )
        return self

    def scheme(self, format_: str) -> Scheme:
        """The scheme that a format stores it under."""
        if self.type == "int":
            return _of_integers(self, format_)
        if self.type in _FIXED:
            whole = self.type == "nvfp4" and format_ != "mlx"  # a scale of the whole matrix
            outer = "divides" if whole else ""
            book = "e2m1" if self.bits == 4 else "e4m3"
            return Scheme(self.bits, self.group_size, True, _FIXED[self.type][2], book, 1, outer)
        # bfloat16 is what transformers gives the scales of most models when it loads them: scales
        # that are stored in it are the same everywhere.
        dtype = "float32" if format_ == "fp8" else "bfloat16"
        return Scheme(8, self.group_size, True, dtype, "e4m3", self.rows)


def _of_integers(weights: Weights, format_: str) -> Scheme:
    """Formats differ in how they store the scales of integers."""
    scheme = Scheme(weights.bits, weights.group_size, weights.symmetric, rows=weights.rows)
    if format_ == "bitsandbytes":
        return replace(scheme, scale_dtype="float32", outer="after")
    if format_ == "qserve":
        return replace(scheme, scale_dtype="int8", outer="rows")
    return mlx_affine(scheme) if format_ == "mlx" else scheme


def mlx_affine(scheme: Scheme) -> Scheme:
    """The scheme as MLX stores integers: scales have the dtype of the model."""
    return replace(scheme, scale_dtype="bfloat16", outer="offset")


class WeightsPatch(Table):
    """The part of `weights` that an override changes."""

    bits: int | None = Field(default=None, ge=2, le=8)
    group_size: int | None = None
    symmetric: bool | None = None

    check_group = field_validator("group_size")(_group_size)


def patched(scheme: Scheme, patch: WeightsPatch) -> Scheme:
    """`scheme` with the keys that `patch` gives."""
    if scheme.is_float:
        return scheme
    return replace(
        scheme,
        bits=scheme.bits if patch.bits is None else patch.bits,
        group_size=scheme.group_size if patch.group_size is None else patch.group_size,
        symmetric=scheme.symmetric if patch.symmetric is None else patch.symmetric,
    )


class Override(Table):
    """Another scheme, or none, for the modules whose checkpoint name matches. Later ones win."""

    match: str = Field(
        min_length=1,
        description='shell pattern, such as "*.down_proj" or "*.layers.0.*"; one that ends in the '
        "name of the output head, lm_head, quantizes that, too",
    )
    weights: WeightsPatch | None = None
    dense: bool = Field(
        default=False, description="not quantized; allows much that a plan would refuse to leave so"
    )

    @model_validator(mode="after")
    def one_of_both(self) -> "Override":
        if self.dense == (self.weights is not None):
            raise PydanticCustomError(
                "override", "expected either `weights` with keys to change, or `dense: true`", {}
            )
        return self


class Activations(Table):
    """Inputs of the quantized layers, which the engine rounds: with dynamic scales, one for each
    token or group of features, or with a static one per tensor, which is calibrated."""

    bits: Literal[4, 8] = Field(description="8; 4 of nvfp4 and mxfp4, of int for evaluations only")
    type: Literal["int", "float", "nvfp4", "mxfp4"] = Field(
        description="int8, float8_e4m3, or the FP4 of the weights"
    )
    group_size: int = Field(default=-1, description="features per scale; -1: one per token")
    dynamic: bool = Field(
        default=True,
        description="false: one scale a layer, from calibration, as nvfp4 has besides its groups'",
    )
    scale: Literal["token", "tensor"] = Field(
        default="token",
        description="of dynamic ones; tensor: one for all tokens that come together",
    )
    observer: Literal["minmax", "percentile", "mse"] = Field(
        default="minmax", description="of stored scales: the range that calibration gives them"
    )
    percentile: float = Field(
        default=99.99, gt=50, le=100, description="of numbers, that observer percentile keeps"
    )

    check_group = field_validator("group_size")(_group_size)
    check_type = field_validator("type", mode="before")(_no_e5m2)

    @model_validator(mode="after")
    def consistent(self) -> "Activations":
        if self.type in _FIXED:
            bits, size, _ = _FIXED[self.type]
            wanted = {"bits": bits, "group_size": size, "dynamic": True, "scale": "token"}
            for key, value in wanted.items():
                if getattr(self, key) != value:
                    raise PydanticCustomError(
                        "type", f"type {self.type} has {key} {str(value).lower()}", {}
                    )
        if not self.dynamic and self.group_size != -1:
            raise PydanticCustomError(
                "dynamic", "one scale for all inputs (dynamic: false) has group_size -1", {}
            )
        if self.bits == 4 and (self.type == "float" or not self.dynamic):
            raise PydanticCustomError(
                "bits", "4 bits go with type nvfp4 or mxfp4, or int and dynamic: true", {}
            )
        if self.observer != "minmax" and not self.stored_as:
            raise PydanticCustomError(
                "observer", "an observer is for stored scales (dynamic: false, or nvfp4)", {}
            )
        if self.observer == "mse" and self.type == "nvfp4":
            raise PydanticCustomError(
                "observer",
                "mse looks at single numbers, and nvfp4 rounds 16 together: minmax or percentile",
                {},
            )
        usual = type(self).model_fields["percentile"].default
        if self.percentile != usual and self.observer != "percentile":
            raise PydanticCustomError(
                "percentile", "percentile is read by observer: percentile", {}
            )
        if self.scale == "tensor" and self.group_size != -1:
            raise PydanticCustomError("scale", "scale tensor has group_size -1", {})
        return self

    @property
    def stored_as(self) -> str:
        """The tensor of the scale from calibration; empty where there is none."""
        if self.type == "nvfp4":
            return "input_global_scale"
        return "" if self.dynamic else "input_scale"

    @property
    def reach(self) -> float:
        """What the largest input becomes; of nvfp4, a group's scale times its largest code."""
        return {"float": 448.0, "nvfp4": 448.0 * 6.0}.get(self.type, 127.0)


class KvCache(Table):
    """Keys and values that the engine keeps: with scales from calibration, one for all of a layer
    or one a head, or, in format qserve, of the engine's own making."""

    bits: Literal[4, 8] = Field(description="4 or 8")
    type: Literal["int", "float"] = Field(description="integers, or (8 bits) float8_e4m3")
    scale: Literal["tensor", "head"] = Field(
        default="tensor", description="one scale a layer, or one for each of its heads"
    )
    dynamic: bool = Field(
        default=False,
        description="true: a scale and a zero for each token and head, told at run time",
    )

    check_type = field_validator("type", mode="before")(_no_e5m2)

    @model_validator(mode="after")
    def consistent(self) -> "KvCache":
        if self.type == "float" and (self.bits != 8 or self.dynamic):
            raise PydanticCustomError(
                "type", "type float has bits 8 and scales from calibration (dynamic: false)", {}
            )
        if self.dynamic and self.scale != "head":
            raise PydanticCustomError("dynamic", "dynamic: true goes with scale head", {})
        return self


class LlmInt8(Table):
    """LLM.int8(): columns of the input that reach the threshold are kept in float16."""

    threshold: float = Field(default=6.0, ge=0, description="of |x|; written into the config")
    outliers: bool = Field(
        default=False, description="measure which columns of each input reach the threshold"
    )


class MlxOptions(Table):
    """MLX's format: what lies outside of the decoder blocks is quantized, too; the embedding, and
    so a head that is it, by rounding to nearest."""

    embedding: Literal[2, 3, 4, 5, 6, 8] | None = Field(
        default=None, description="bits of the token embedding; null: dense"
    )
    head: Literal[2, 3, 4, 5, 6, 8] | None = Field(
        default=None, description="bits of the output head, and of an embedding that is the head"
    )
