"""Recipes: what to do to a model, as a small flat YAML file.

`load` reads a shipped recipe by name or a file by path, applies `--set key=value`, and validates.
Every error names the file, the line and the key. The keys are a contract: later versions add
some, and rename none.

The bits a recipe asks for, the method that rounds, and the format that stores are independent:
`method: awq` is the transform awq (scale search), then clipping and rounding to nearest;
`method: [awq, gptq]` is the transform awq, then GPTQ's rounding.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, field_validator, model_validator

from qtool.errors import RecipeError, UsageError
from qtool.recipe.consistency import METHODS, TRANSFORMS, check
from qtool.recipe.file import (
    PAD,
    Calibration,
    NamedTable,
    bounds,
    document,
    find,
    folders,
    read,
    recorded,
    shipped,
    validate,
)
from qtool.recipe.methods import AwqOptions, GptqOptions, RtnOptions, TuneOptions
from qtool.recipe.rotate import RotateOptions
from qtool.recipe.smooth import SmoothAttentionOptions, SmoothOptions
from qtool.recipe.weights import (
    Activations,
    KvCache,
    LlmInt8,
    MlxOptions,
    Override,
    Weights,
    WeightsPatch,
    patched,
)
from qtool.scheme import Scheme

if TYPE_CHECKING:
    from qtool.recipe.gguf import GgufRecipe
    from qtool.recipe.yaml_source import Document

__all__ = [
    "Calibration", "Recipe", "Weights", "WeightsPatch", "find", "folders", "load", "parse",
    "patched", "schema", "shipped",
]  # fmt: skip


class Recipe(NamedTable):
    """A recipe, complete: every key has its effective value."""

    method: tuple[str, ...]
    format: Literal[
        "awq",
        "gptq",
        "compressed-tensors",
        "fp8",
        "bitsandbytes",
        "qserve",
        "mlx",
        "mxfp4",
        "dense",
    ]
    weights: Weights | None = None
    transforms: tuple[str, ...] = ()
    activations: Activations | None = None
    kv_cache: KvCache | None = None
    calibration: Calibration = Calibration()
    overrides: tuple[Override, ...] = ()
    indivisible: Literal["error", "dense", "smaller-group"] = "error"
    pad_intermediate: int = PAD
    rtn: RtnOptions = RtnOptions()
    gptq: GptqOptions = GptqOptions()
    awq: AwqOptions = AwqOptions()
    tune: TuneOptions = TuneOptions()
    llm_int8: LlmInt8 = LlmInt8()
    mlx: MlxOptions = MlxOptions()
    rotate: RotateOptions = RotateOptions()
    smooth: SmoothOptions = SmoothOptions()
    smooth_attention: SmoothAttentionOptions = SmoothAttentionOptions()

    @field_validator("method", mode="before")
    @classmethod
    def method_as_list(cls, value: Any) -> Any:
        # What a validator returns counts as Python, where strict mode wants the tuple itself.
        return (
            (value,) if isinstance(value, str) else tuple(value) if type(value) is list else value
        )

    @model_validator(mode="after")
    def consistent(self) -> "Recipe":
        check(self)
        return self

    @property
    def rounding(self) -> str:
        """The method that makes codes: rtn, gptq or none."""
        if "gptq" in self.method:
            return "gptq"
        return "none" if "none" in self.method else "rtn"

    @property
    def transform_chain(self) -> tuple[str, ...]:
        """The transforms in order, those that `method` implies included."""
        implied = tuple(name for name in self.method if name in TRANSFORMS)
        return self.transforms + tuple(name for name in implied if name not in self.transforms)

    @property
    def clips(self) -> bool:
        """Whether rounding to nearest searches a range, or of small floats a scale, for each
        group."""
        if self.weights is not None and self.weights.type == "fp8":
            return False
        return self.rtn.clip or (self._rounds_as_awq and self.awq.clip)

    @property
    def has_small_floats(self) -> bool:
        """Whether weights become FP8 or FP4."""
        return self.weights is not None and self.weights.type != "int"

    @property
    def _rounds_as_awq(self) -> bool:
        return tuple(name for name in self.method if name != "tune") == ("awq",)

    @property
    def tunes(self) -> bool:
        """Whether scales are moved after rounding, block by block."""
        return "tune" in self.method

    @property
    def compensates(self) -> float:
        """The part of what earlier blocks have lost that matrices compensate for (GPTAQ)."""
        return self.gptq.gptaq if self.rounding == "gptq" else 0.0

    @property
    def guides(self) -> float:
        """The power of squared gradients by which tokens count in GPTQ's sweep; 0: all count
        alike."""
        return self.gptq.guided if self.rounding == "gptq" else 0.0

    @property
    def feeds_back(self) -> int:
        """Samples whose gradients say how rows compensate for each other in GPTQ (YAQA); 0: they do
        not."""
        return self.gptq.yaqa if self.rounding == "gptq" else 0

    @property
    def follows_original(self) -> bool:
        """Whether the original model's states pass its blocks beside those of the quantized one."""
        return self.tunes or self.compensates > 0

    @property
    def reorders_groups(self) -> bool:
        """Whether the columns of a group need not be neighbours (g_idx, desc_act)."""
        return self.rounding == "gptq" and self.gptq.act_order and not self.gptq.static_groups

    @property
    def idle_options(self) -> list[str]:
        """Keys that were given a value and change nothing with this method and format."""
        acting = {
            # GPTQ searches scales of small floats anyway.
            "rtn": {
                "*": self.rounding == "rtn",
                "clip": self.rounding == "rtn" or self.has_small_floats,
            },
            "gptq": {"*": self.rounding == "gptq", "layout": self.format == "gptq"},
            "awq": {
                "*": "awq" in self.transform_chain,
                "clip": self._rounds_as_awq,
                "layout": self.format == "awq",
            },
            "tune": {"*": self.tunes},
            "smooth": {"*": "smooth" in self.transforms, "grid": self.searches_scales},
            "smooth_attention": {"*": "smooth-attention" in self.transforms},
            "rotate": {
                "*": self.rotates,
                "steps": self.learns_rotations,
                "rate": self.learns_rotations,
            },
            "llm_int8": {"*": self.format == "bitsandbytes"},
            "mlx": {"*": self.format == "mlx"},
        }
        found = []
        if self.kv_cache is not None and self.weights is not None and not self.reads_weights:
            found.append("weights")
        for name, acts in acting.items():
            table: BaseModel = getattr(self, name)
            for key in sorted(table.model_fields_set):
                value = getattr(table, key)
                # Not to clip is what happens anyway.
                asked = value if key == "clip" else value != type(table).model_fields[key].default
                if asked and not acts.get(key, acts["*"]):
                    found.append(f"{name}.{key}")
        return found

    @property
    def calibrates(self) -> bool:
        """Whether a forward pass is needed."""
        looks = set(self.transform_chain) - {"rotate"} or self.learns_rotations
        measured = self.measures_inputs or self.measures_cache or self.reports_outliers
        return self.rounding == "gptq" or self.tunes or bool(looks) or measured

    @property
    def depends_on_cpu(self) -> bool:
        """Whether bytes depend on the kind of CPU and on versions of libraries: on sums of floats
        that BLAS or a forward pass makes."""
        return self.calibrates or self.rotates

    @property
    def reads_weights(self) -> bool:
        """Whether anything asks how weights are rounded; some transforms do without a method."""
        looked_at = "awq" in self.transforms or self.learns_rotations or self.searches_scales
        return self.rounding != "none" or looked_at

    @property
    def shares_scales(self) -> bool:
        """Whether a transform needs the statistics of all inputs of a block together."""
        return "awq" in self.transform_chain or "smooth" in self.transform_chain

    @property
    def searches_scales(self) -> bool:
        """Whether the exponent of smoothing is searched."""
        return "smooth" in self.transforms and self.smooth.alpha == "search"

    @property
    def rotates(self) -> bool:
        """Whether the network is rotated before all else."""
        return "rotate" in self.transforms

    @property
    def learns_rotations(self) -> bool:
        """Whether the rotations are found on calibration samples."""
        return self.rotates and self.rotate.kind == "learned"

    @property
    def measures_inputs(self) -> bool:
        """Whether the largest input of each layer is stored as a scale."""
        return self.activations is not None and bool(self.activations.stored_as)

    @property
    def reports_outliers(self) -> bool:
        """Whether the columns of inputs that LLM.int8() keeps apart are looked for."""
        return self.format == "bitsandbytes" and self.llm_int8.outliers

    @property
    def measures_cache(self) -> bool:
        """Whether the largest keys and values of each layer are stored as scales."""
        return self.kv_cache is not None and not self.kv_cache.dynamic

    @property
    def measures_ranges(self) -> bool:
        """Whether that scale comes from a histogram."""
        wanted = self.activations
        return wanted is not None and wanted.observer != "minmax"

    @property
    def scheme(self) -> Scheme:
        """The scheme of every quantized tensor that no override matches."""
        if self.weights is None:
            raise RecipeError(f"recipe {self.name}: it has no weights to quantize")
        return self.weights.scheme(self.format)

    def effective(self) -> dict[str, Any]:
        """Every key with its value, ready for JSON: what provenance records."""
        return recorded(self.model_dump(mode="json"))


def calibration_sets(
    source: str | None, samples: int | None, length: int | None, seed: int | None
) -> list[str]:
    """What --calibration, --samples, --length and --seed mean, as `--set` items.

    UsageError, which names the option, for a number that a recipe may not have.
    """
    given = {"samples": samples, "length": length, "seed": seed}
    for key, value in given.items():
        least, most = bounds(key)
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{key} {value}: expected {least:,} to {most:,}")
    sets = [f"calibration.{key}={value}" for key, value in given.items() if value is not None]
    if source is not None:
        sets.append(f"calibration.source={json.dumps(source, ensure_ascii=False)}")
    return sets


def common_calibration(
    recipes: "Sequence[Recipe | GgufRecipe]", sets: Sequence[str]
) -> Calibration:
    """How all of `recipes` are calibrated; without any, what `sets` make of the defaults.

    RecipeError where they differ: one measurement cannot serve them all.
    """
    if not recipes:
        return parse("method: none\nformat: dense\n", "calibrate", "none", sets).calibration
    first = recipes[0].calibration
    for other in recipes[1:]:
        for key, value in first.model_dump().items():
            found = getattr(other.calibration, key)
            if found != value:
                raise RecipeError(
                    f"recipes {recipes[0].name} and {other.name} differ in calibration.{key} "
                    f"({json.dumps(value)} and {json.dumps(found)}): one measurement cannot serve "
                    "both; give the value on the command line, or calibrate for each"
                )
    return first


def load(name_or_path: str, sets: Sequence[str] = ()) -> "Recipe | GgufRecipe":
    """The recipe with `sets` ("weights.bits=3") applied, validated."""
    path = find(name_or_path)
    return parse(read(path), str(path), path.stem, sets)


def parse(text: str, origin: str, name: str, sets: Sequence[str] = ()) -> "Recipe | GgufRecipe":
    """A recipe from its text; `origin` is what error messages call the text."""
    source = document(text, origin, sets)
    try:
        return _validated(source).named(name, sets)
    except RecipeError as error:
        if not sets:
            raise
        from qtool.recipe.contradicted import blamed

        raise blamed(str(error), text, origin, name, sets, _validated) from None


def _validated(source: "Document") -> "Recipe | GgufRecipe":
    if source.at(("format",)) == "gguf":
        from qtool.recipe.gguf import GgufRecipe

        return validate(GgufRecipe, source)
    return validate(Recipe, source)


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file, for editors."""
    from qtool.recipe.gguf import GgufRecipe

    recipe = Recipe.model_json_schema()
    method = recipe["properties"]["method"]
    names = {"enum": list(METHODS), "type": "string"}
    method.clear()
    method["anyOf"] = [names, {"type": "array", "items": names, "minItems": 1, "maxItems": 3}]
    recipe["properties"]["transforms"]["items"] = {"enum": list(TRANSFORMS), "type": "string"}
    gguf = GgufRecipe.model_json_schema()
    tables = recipe.pop("$defs") | gguf.pop("$defs")
    return {
        "title": "qtool recipe",
        "type": "object",
        "if": {"properties": {"format": {"const": "gguf"}}, "required": ["format"]},
        "then": {"$ref": "#/$defs/GgufRecipe"},
        "else": {"$ref": "#/$defs/Recipe"},
        "$defs": {**tables, "Recipe": recipe, "GgufRecipe": gguf},
    }
