"""Recipes: what to do to a model, as a small flat YAML file.

`load` reads a shipped recipe by name or a file by path, applies `--set key=value`, and validates.
Every error names the file, the line and the key. The keys are a contract: later versions add
some, and rename none.

The bits a recipe asks for, the method that rounds, and the format that stores are independent:
`method: awq` is the transform awq (scale search), then clipping and rounding to nearest;
`method: [awq, gptq]` is the transform awq, then GPTQ's rounding.
"""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

import qtool
from qtool import yaml_source
from qtool.errors import RecipeError
from qtool.scheme import Scheme
from qtool.yaml_source import Document

METHODS = ("rtn", "gptq", "awq", "none")
CHAINS = (("rtn",), ("gptq",), ("awq",), ("awq", "rtn"), ("awq", "gptq"), ("none",))
TRANSFORMS = ("awq",)


class _Table(BaseModel):
    # Strict, so that `bits: true` or `symmetric: "yes"` is an error and not a guess.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def _group_size(value: int | None) -> int | None:
    if value is not None and value != -1 and (value < 16 or value % 8):
        raise PydanticCustomError(
            "group_size",
            "expected -1 (one group per output channel) or a multiple of 8 from 16 on; "
            "engines load -1, 32, 64 and 128",
            {},
        )
    return value


class Weights(_Table):
    """Bits of a weight, input features that share a scale, and whether zero is in the middle."""

    bits: int = Field(ge=2, le=8)
    group_size: int = Field(description="input features per scale; -1: one per output channel")
    symmetric: bool

    check_group = field_validator("group_size")(_group_size)


class WeightsPatch(_Table):
    """The part of `weights` that an override changes."""

    bits: int | None = Field(default=None, ge=2, le=8)
    group_size: int | None = None
    symmetric: bool | None = None

    check_group = field_validator("group_size")(_group_size)


class Override(_Table):
    """Another scheme, or none, for the modules whose checkpoint name matches. Later ones win."""

    match: str = Field(min_length=1, description='shell pattern, such as "*.down_proj" or lm_head')
    weights: WeightsPatch | None = None
    dense: bool = False

    @model_validator(mode="after")
    def one_of_both(self) -> "Override":
        if self.dense == (self.weights is not None):
            raise PydanticCustomError(
                "override", "expected either `weights` with keys to change, or `dense: true`", {}
            )
        return self


class Calibration(_Table):
    """What the model reads while its activations are measured."""

    source: str | None = Field(
        default=None, description="text or JSONL file, or a hub dataset; default: pydoc_data.topics"
    )
    samples: int = Field(default=128, ge=1, le=1_000_000)
    length: int = Field(default=512, ge=8, le=1_048_576, description="tokens per sample")
    seed: int = Field(default=0, ge=0, le=2**32 - 1)


class RtnOptions(_Table):
    """Round to nearest."""

    clip: bool = Field(default=False, description="shrink each group's range to the least error")


class GptqOptions(_Table):
    """GPTQ's rounding, and the GPTQ layout."""

    act_order: bool = Field(default=True, description="quantize the most excited columns first")
    static_groups: bool = Field(
        default=True, description="groups stay runs of neighbours, so that g_idx is k // group_size"
    )
    damp_percent: float = Field(
        default=0.01, gt=0, le=1, description="of the mean diagonal, added to the diagonal"
    )
    token_damping: bool = Field(
        default=True, description="add in_features / calibration tokens to damp_percent"
    )
    mse: bool = Field(default=True, description="search each group's range for the least error")
    layout: Literal["v1", "v2"] | None = Field(
        default=None, description="of format gptq; default: v1 when symmetric, else v2"
    )


class AwqOptions(_Table):
    """AWQ's scale search and clipping, and the AWQ layout."""

    grid: int = Field(default=20, ge=1, le=1000, description="exponents tried from 0 to 1")
    clip: bool = Field(default=True, description="search each group's range for the least error")
    layout: Literal["gemm", "gemv", "gemv_fast", "llm_awq"] = Field(
        default="gemm", description="of format awq; engines load gemm"
    )


class Recipe(_Table):
    """A recipe, complete: every key has its effective value."""

    method: tuple[str, ...]
    format: Literal["awq", "gptq", "dense"]
    weights: Weights | None = None
    transforms: tuple[str, ...] = ()
    activations: None = None
    kv_cache: None = None
    calibration: Calibration = Calibration()
    overrides: tuple[Override, ...] = ()
    indivisible: Literal["error", "dense", "smaller-group"] = "error"
    rtn: RtnOptions = RtnOptions()
    gptq: GptqOptions = GptqOptions()
    awq: AwqOptions = AwqOptions()

    _name: str = PrivateAttr(default="recipe")
    _changes: tuple[str, ...] = PrivateAttr(default=())

    @field_validator("method", mode="before")
    @classmethod
    def method_as_list(cls, value: Any) -> Any:
        # What a validator returns counts as Python, where strict mode wants the tuple itself.
        return (
            (value,) if isinstance(value, str) else tuple(value) if type(value) is list else value
        )

    @field_validator("activations", "kv_cache", mode="before")
    @classmethod
    def weights_only(cls, value: Any) -> Any:
        if value is not None:
            raise PydanticCustomError(
                "later", "this version quantizes weights only; remove the key or set it to null", {}
            )
        return value

    @model_validator(mode="after")
    def consistent(self) -> "Recipe":
        for key, names, known in (
            ("method", self.method, METHODS),
            ("transforms", self.transforms, TRANSFORMS),
        ):
            for name in names:
                if name not in known:
                    raise _conflict(key, f"{name!r} is unknown; known: {', '.join(known)}")
        if self.method not in CHAINS:
            chains = ", ".join("[" + ", ".join(chain) + "]" for chain in CHAINS)
            found = "[" + ", ".join(self.method) + "]"
            raise _conflict("method", f"{found} is no order that exists; one of {chains}")
        if (self.rounding == "none") != (self.format == "dense"):
            raise _conflict(
                "format",
                f"method {'/'.join(self.method)} does not go with format {self.format}; "
                "`method: none` is written as `format: dense`, and nothing else is",
            )
        if self.weights is None and (self.rounding != "none" or self.transforms):
            raise _conflict("weights", "missing; it says bits, group_size and symmetric")
        return self

    @property
    def name(self) -> str:
        """The shipped name, or the file's name without its ending."""
        return self._name

    @property
    def changes(self) -> tuple[str, ...]:
        """The `--set` items put over the file's keys, but for those of the calibration."""
        return self._changes

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
        """Whether rounding to nearest searches a smaller range."""
        return self.rtn.clip or (self.method == ("awq",) and self.awq.clip)

    @property
    def reorders_groups(self) -> bool:
        """Whether the columns of a group need not be neighbours (g_idx, desc_act)."""
        return self.rounding == "gptq" and self.gptq.act_order and not self.gptq.static_groups

    @property
    def idle_options(self) -> list[str]:
        """Keys that were given a value and change nothing with this method and format."""
        acting = {
            "rtn": {"*": self.rounding == "rtn"},
            "gptq": {"*": self.rounding == "gptq", "layout": self.format == "gptq"},
            "awq": {
                "*": "awq" in self.transform_chain,
                "clip": self.method == ("awq",),
                "layout": self.format == "awq",
            },
        }
        found = []
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
        return self.rounding == "gptq" or bool(self.transform_chain)

    @property
    def scheme(self) -> Scheme:
        """The scheme of every quantized tensor that no override matches."""
        if self.weights is None:
            raise RecipeError(f"recipe {self.name}: it has no weights to quantize")
        return Scheme(self.weights.bits, self.weights.group_size, self.weights.symmetric)

    def effective(self) -> dict[str, Any]:
        """Every key with its value, ready for JSON: what provenance records."""
        return self.model_dump(mode="json")


def _conflict(path: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{message}", {"path": path, "message": message})


def patched(scheme: Scheme, patch: WeightsPatch) -> Scheme:
    """`scheme` with the keys that `patch` gives."""
    return Scheme(
        scheme.bits if patch.bits is None else patch.bits,
        scheme.group_size if patch.group_size is None else patch.group_size,
        scheme.symmetric if patch.symmetric is None else patch.symmetric,
    )


def folders() -> list[Path]:
    """Where shipped recipes lie: inside the installed package, or beside it in a checkout."""
    return [path for root in qtool.__path__ if (path := Path(root) / "recipes").is_dir()]


def shipped() -> dict[str, Path]:
    """Name to file of every shipped recipe, sorted by name."""
    found = {path.stem: path for folder in folders() for path in folder.glob("*.yaml")}
    return dict(sorted(found.items()))


def find(name_or_path: str) -> Path:
    """The file of a shipped recipe or of a path."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    names = shipped()
    if name_or_path in names:
        return names[name_or_path]
    if path.is_file():
        return path
    near = difflib.get_close_matches(name_or_path, names, 3, 0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise RecipeError(
        f"recipe {name_or_path!r} does not exist: {hint}`qtool recipes` lists them; "
        "a file of your own ends in .yaml"
    )


def calibration_sets(
    source: str | None, samples: int | None, length: int | None, seed: int | None
) -> list[str]:
    """What --calibration, --samples, --length and --seed mean, as `--set` items."""
    given = {"samples": samples, "length": length, "seed": seed}
    sets = [f"calibration.{key}={value}" for key, value in given.items() if value is not None]
    if source is not None:
        sets.append(f"calibration.source={json.dumps(source, ensure_ascii=False)}")
    return sets


def common_calibration(recipes: Sequence[Recipe], sets: Sequence[str]) -> Calibration:
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


def load(name_or_path: str, sets: Sequence[str] = ()) -> Recipe:
    """The recipe with `sets` ("weights.bits=3") applied, validated."""
    path = find(name_or_path)
    try:
        with path.open("rb") as file:
            raw = file.read(yaml_source.MAX_BYTES + 1)
        text = raw.decode()
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe file") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start})") from None
    return parse(text, str(path), path.stem, sets)


def parse(text: str, origin: str, name: str, sets: Sequence[str] = ()) -> Recipe:
    """A recipe from its text; `origin` is what error messages call the text."""
    document = yaml_source.parse(text, origin)
    if not isinstance(document.value, dict):
        raise RecipeError(f"{origin}:1: a recipe is a mapping of keys such as `method: awq`")
    for item in sets:
        _apply(document, item)
    try:
        # Through JSON, whose strict mode takes a list for a tuple and nothing else by kindness.
        recipe = Recipe.model_validate_json(json.dumps(document.value))
    except ValidationError as error:
        raise RecipeError(_explain(error, document)) from None
    recipe._name = name
    recipe._changes = tuple(item for item in sets if not item.startswith("calibration."))
    return recipe


def _apply(document: Document, item: str) -> None:
    """Put one --set item into the document."""
    key, equals, text = item.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        raise RecipeError(f"--set {item}: expected key=value, such as weights.bits=3")
    origin = f"--set {item}"
    given = yaml_source.parse(text, origin, lines=False)
    path: yaml_source.Path = ()
    for position, step in enumerate(steps):
        table = document.at(path)
        last = position == len(steps) - 1
        if isinstance(table, dict):
            path = (*path, step)
            if last:
                table[step] = given.value
            elif table.get(step) is None:
                table[step] = {}
        elif isinstance(table, list):
            if not step.isdecimal() or int(step) >= len(table):
                raise RecipeError(f"{origin}: {'.'.join(steps[:position])} has no item {step}")
            path = (*path, int(step))
            if last:
                table[int(step)] = given.value
        else:
            raise RecipeError(f"{origin}: {'.'.join(steps[:position])} is a value, not a mapping")
    document.where.update({path + inner: origin for inner in given.where})


def _explain(error: ValidationError, document: Document) -> str:
    """The first problem, as one sentence: file:line: key: what is wrong."""
    problems = error.errors(include_url=False)
    # A misspelled key is also one that is missing; the spelling is what has to be told.
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    problem = (unknown or problems)[0]
    path = tuple(problem["loc"])
    context = problem.get("ctx", {})
    if problem["type"] == "conflict":
        path = (str(context["path"]),)
        message = str(context["message"])
    elif problem["type"] == "extra_forbidden":
        known = _keys(path[:-1])
        near = difflib.get_close_matches(str(path[-1]), known, 1)
        message = f"unknown key; {f'did you mean {near[0]}? ' if near else ''}known: "
        message += ", ".join(known)
    elif problem["type"] == "missing":
        message = "missing; a recipe must say it"
    else:
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        message = message.replace("a valid array", "a list").replace("an object", "a mapping")
        value = document.at(path)
        if isinstance(value, (bool, int, float, str)):
            message += f", found {json.dumps(value)}"
    key = ".".join(str(step) for step in path)
    where = document.locate(path)
    return f"{where}: {key}: {message}" if key else f"{where}: {message}"


def _keys(path: tuple[str | int, ...]) -> list[str]:
    """The keys that the table at `path` knows."""
    tables: dict[str, type[_Table]] = {
        "": Recipe, "weights": Weights, "calibration": Calibration, "overrides": Override,
        "overrides.weights": WeightsPatch, "rtn": RtnOptions, "gptq": GptqOptions,
        "awq": AwqOptions,
    }  # fmt: skip
    name = ".".join(step for step in path if isinstance(step, str))
    return list(tables[name].model_fields)


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file, for editors."""
    found = Recipe.model_json_schema()
    found["title"] = "qtool recipe"
    method = found["properties"]["method"]
    names = {"enum": list(METHODS), "type": "string"}
    method.clear()
    method["anyOf"] = [names, {"type": "array", "items": names, "minItems": 1, "maxItems": 2}]
    found["properties"]["transforms"]["items"] = {"enum": list(TRANSFORMS), "type": "string"}
    return found
