"""Recipes with `format: gguf`: a file type of llama.cpp, and what differs from it.

    format: gguf
    type: q4_k_m             # as llama-quantize names it, in any case of letters
    pure: false              # the same type for everything
    output_type: q8_0        # of output.weight
    embedding_type: q8_0     # of token_embd.weight
    leave_output: false      # output.weight as in the source
    overrides:               # the first that matches counts, as with llama-quantize --tensor-type
    - match: attn_v          # a regular expression found anywhere in the tensor's name,
      type: q6_k
    - match: "*_shexp.weight"  # or, where it starts with a star, a shell pattern of the whole name
      dense: true
    method: gptq             # choose codes again by GPTQ's sweep, onto the scales of each block
    importance: true         # measure which columns count, with `calibration`; gptq does
    transforms: [rotate]     # of a Hugging Face checkpoint only: any of rotate, smooth,
                             # smooth-attention and awq, with the tables of the first three

Tensors are named as in the GGUF file: blk.0.attn_q.weight.
"""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qtool.gguf_mixtures.rules import Options, Override
from qtool.gguf_mixtures.table import FILE_TYPES, TYPES, FileType
from qtool.gguf_types import BlockType
from qtool.recipe.file import (
    ALIASES,
    PAD,
    Calibration,
    NamedTable,
    Table,
    conflict,
    recorded,
)
from qtool.recipe.methods import SweepOptions, TuneOptions
from qtool.recipe.rotate import RotateOptions
from qtool.recipe.smooth import SmoothAttentionOptions, SmoothOptions
from qtool.recipe.weights import Weights

# Bits, weights that share a scale, and whether zero is in the middle, by a block's type.
_ROUNDS_AS = {
    "Q4_0": (4, 32, True), "Q4_1": (4, 32, False), "Q5_0": (5, 32, True), "Q5_1": (5, 32, False),
    "Q8_0": (8, 32, True), "Q2_K": (2, 16, False), "Q3_K": (3, 16, True), "Q4_K": (4, 32, False),
    "Q5_K": (5, 32, False), "Q6_K": (6, 16, True), "IQ1_S": (2, 32, True), "IQ1_M": (2, 16, True),
    "IQ2_XXS": (2, 32, True), "IQ2_XS": (2, 16, True), "IQ2_S": (2, 16, True),
    "IQ3_XXS": (3, 32, True), "IQ3_S": (3, 32, True), "IQ4_NL": (4, 32, True),
    "IQ4_XS": (4, 32, True),
}  # fmt: skip


def _file_type(value: str) -> str:
    name = value.lower()
    name = ALIASES.get(name, name)
    if name.upper() not in FILE_TYPES:
        raise PydanticCustomError(
            "file_type", "expected one of {known}", {"known": ", ".join(FILE_TYPES).lower()}
        )
    return name


def _tensor_type(value: str | None) -> str | None:
    if value is not None and value.upper() not in TYPES:
        raise PydanticCustomError(
            "tensor_type", "expected one of {known}", {"known": ", ".join(TYPES).lower()}
        )
    return None if value is None else value.lower()


class GgufOverride(Table):
    """Another type, or that of the source, for the tensors whose GGUF name matches. The first that
    matches counts."""

    match: str = Field(min_length=1, description="regular expression, such as attn_v or blk\\.0\\.")
    type: str | None = Field(default=None, description="such as q6_k or f16")
    dense: bool = Field(default=False, description="as in the source")

    check_type = field_validator("type")(_tensor_type)

    @field_validator("match")
    @classmethod
    def compiles(cls, value: str) -> str:
        try:
            if not value.startswith("*"):
                re.compile(value.lower())
        except re.error as error:
            raise PydanticCustomError(
                "match", "no regular expression: {why}", {"why": str(error)}
            ) from None
        return value

    @model_validator(mode="after")
    def one_of_both(self) -> "GgufOverride":
        if self.dense == (self.type is not None):
            raise PydanticCustomError("override", "expected either `type` or `dense: true`", {})
        return self


class GgufRotateOptions(RotateOptions):
    """Rotations, so that no channel stands out: r1 and r2 are absorbed by the weights."""

    # What `consistent` refuses, and keys of learning, have one value in the schema.
    kind: Literal["hadamard", "random", "learned"] = Field(
        default="hadamard",
        description="hadamard, with random signs; or random orthogonal",
        json_schema_extra={"enum": ["hadamard", "random"]},
    )
    r3: bool = Field(default=False, json_schema_extra={"const": False})
    r4: bool = Field(default=False, json_schema_extra={"const": False})
    steps: int = Field(default=60, ge=1, le=10_000, json_schema_extra={"const": 60})
    rate: float = Field(default=5.0, gt=0, le=100, json_schema_extra={"const": 5.0})


class GgufRecipe(NamedTable):
    """A recipe for one GGUF file, complete: every key has its effective value."""

    format: Literal["gguf"]
    type: str = Field(description="file type, such as q4_k_m")
    method: Literal["rtn", "gptq"] | tuple[Literal["gptq"], Literal["tune"]] = Field(
        default="rtn",
        description="how codes are chosen: as llama.cpp does, or by GPTQ's sweep; [gptq, tune] "
        "moves the scales of a block's matrices afterwards",
    )
    pure: bool = Field(default=False, description="the same type for every matrix")
    output_type: str | None = Field(default=None, description="of output.weight")
    embedding_type: str | None = Field(default=None, description="of token_embd.weight")
    leave_output: bool = Field(default=False, description="output.weight as in the source")
    overrides: tuple[GgufOverride, ...] = ()
    importance: bool = Field(
        default=False, description="measure which columns count; with method gptq it is true"
    )
    pad_intermediate: int = PAD
    transforms: tuple[Literal["rotate", "smooth", "smooth-attention", "awq"], ...] = ()
    rotate: GgufRotateOptions = GgufRotateOptions()
    smooth: SmoothOptions = SmoothOptions()
    smooth_attention: SmoothAttentionOptions = SmoothAttentionOptions()
    gptq: SweepOptions = SweepOptions()
    tune: TuneOptions = TuneOptions()
    calibration: Calibration = Calibration()

    check_file_type = field_validator("type")(_file_type)
    check_types = field_validator("output_type", "embedding_type")(_tensor_type)

    @field_validator("method", mode="before")
    @classmethod
    def check_list(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        if list(value) != ["gptq", "tune"]:
            raise PydanticCustomError("method_list", "as a list it is [gptq, tune]")
        return tuple(value)

    @model_validator(mode="after")
    def consistent(self) -> "GgufRecipe":
        if self.sweeps and "importance" not in self.model_fields_set:
            self.__dict__["importance"] = True  # it is measured, whether asked for or not
        if self.sweeps and not self.importance:
            raise conflict(
                "importance",
                "method gptq measures what matrices read, importance with it; remove the key",
            )
        if self.pad_intermediate > 1 and self.pad_intermediate % 32:
            raise conflict(
                "pad_intermediate",
                "blocks are of 32 weights, or (K-quants, most IQ types) of 256: take a multiple",
            )
        if self.leave_output and self.output_type is not None:
            raise conflict("leave_output", "does not go with output_type; remove one of them")
        for name in self.transforms:
            if self.transforms.count(name) > 1:
                raise conflict("transforms", f"{name} is there more than once; once is enough")
        if "rotate" in self.transforms[1:]:
            raise conflict("transforms", "rotate changes the whole network and comes first")
        if self.searches_scales and self.rounds_as is None:
            key, what = ("transforms", "awq") if "awq" in self.transforms else (
                "smooth.alpha", "search")  # fmt: skip
            raise conflict(
                key,
                f"{what} looks for the scales with which groups of 2 to 8 bits are rounded best, "
                f"and type {self.type} has no such groups; leave it out",
            )
        if self.rotates and self.rotate.online:
            raise conflict(
                "rotate",
                "a GGUF file cannot say that r3 and r4 are to be done while the model runs; "
                "format compressed-tensors can",
            )
        if self.rotates and not self.rotate.some:
            raise conflict("rotate", "r1 and r2 are both false, so that nothing is rotated")
        if self.rotates and self.rotate.kind == "learned":
            raise conflict("rotate.kind", "learned rotations go with formats other than gguf")
        return self

    @property
    def file_type(self) -> FileType:
        """The file type as a row of the table."""
        return FILE_TYPES[self.type.upper()]

    @property
    def sweeps(self) -> bool:
        """Whether GPTQ chooses the codes."""
        return self.method != "rtn"

    @property
    def tunes(self) -> bool:
        """Whether scales are moved after that, block by block."""
        return isinstance(self.method, tuple)

    @property
    def compensates(self) -> float:
        """The part of what earlier blocks have lost that matrices compensate for (GPTAQ)."""
        return self.gptq.gptaq if self.sweeps else 0.0

    @property
    def guides(self) -> float:
        """The power of squared gradients by which tokens count in GPTQ's sweep; 0: all count
        alike."""
        return self.gptq.guided if self.sweeps else 0.0

    @property
    def feeds_back(self) -> int:
        """Samples whose gradients say how rows compensate for each other in GPTQ (YAQA); 0: they do
        not."""
        return self.gptq.yaqa if self.sweeps else 0

    @property
    def rotates(self) -> bool:
        """Whether the network is rotated before all else."""
        return "rotate" in self.transforms

    @property
    def scaling(self) -> tuple[str, ...]:
        """The transforms that scale channels, in order: they look at activations."""
        return tuple(name for name in self.transforms if name != "rotate")

    @property
    def searches_scales(self) -> bool:
        """Whether a transform asks how weights are going to be rounded."""
        searched = "smooth" in self.transforms and self.smooth.alpha == "search"
        return searched or "awq" in self.transforms

    @property
    def rounds_as(self) -> Weights | None:
        """Groups of integers that are rounded much as the file type rounds most weights."""
        found = _ROUNDS_AS.get(self.file_type.default.name)
        if found is None:
            return None
        bits, size, symmetric = found
        return Weights(bits=bits, group_size=size, symmetric=symmetric)

    @property
    def calibrates(self) -> bool:
        """Whether a forward pass is needed, unless importance is given as a file."""
        return self.importance or bool(self.scaling)

    @property
    def options(self) -> Options:
        """What decides about the types of tensors."""
        return Options(
            self.file_type,
            self.pure,
            _block_type(self.output_type),
            _block_type(self.embedding_type),
            self.leave_output,
            tuple(Override(item.match, _block_type(item.type)) for item in self.overrides),
        )

    def effective(self) -> dict[str, Any]:
        """Every key with its value, ready for JSON: what the artifact records.

        Of transforms that are not done nothing is said, and files are what they ever were.
        """
        found = self.model_dump(mode="json")
        for name in ("rotate", "smooth", "smooth-attention"):
            if name not in self.transforms:
                del found[name.replace("-", "_")]
        if not self.transforms:
            del found["transforms"]
        if not self.sweeps:
            del found["method"], found["gptq"]
        else:
            asked = {"gptaq": self.compensates, "guided": self.guides, "yaqa": self.feeds_back}
            for name, value in asked.items():
                if not value:
                    del found["gptq"][name]
        if not self.tunes:
            del found["tune"]
        return recorded(found)


def _block_type(name: str | None) -> BlockType | None:
    return None if name is None else TYPES[name.upper()]
