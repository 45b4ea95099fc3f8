"""What recipes of every format share: finding the file, `--set`, and errors that name the line.

A recipe is a small flat YAML file; a pydantic model says which keys it may have. Every error names
the file, the line and the key.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

import qtool
from qtool.errors import RecipeError
from qtool.recipe import yaml_source
from qtool.recipe.foreign import foreign_keys, meant
from qtool.recipe.yaml_source import Document

SET = "--set"  # an item's place begins so, as that of a key of the file with the file's name
# llama-quantize's short names of the middle sizes.
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}


class Table(BaseModel):
    # Strict, so that `bits: true` or `symmetric: "yes"` is an error and not a guess.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class NamedTable(Table):
    """A whole recipe: its keys, its name, and what the command line changed of the file."""

    _name: str = PrivateAttr(default="recipe")
    _changes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def name(self) -> str:
        """The shipped name, or the file's name without its ending."""
        return self._name

    @property
    def changes(self) -> tuple[str, ...]:
        """The `--set` items put over the file's keys, but for those of the calibration."""
        return self._changes

    def named(self, name: str, sets: Sequence[str]) -> Self:
        """This recipe, after it was given its name and the `--set` items that changed it."""
        self._name = name
        self._changes = tuple(item for item in sets if not item.startswith("calibration."))
        return self


AnyTable = TypeVar("AnyTable", bound=Table)


# Of both kinds of recipe; see qtool.checkpoints.padding.
PAD: Any = Field(
    default=0,
    ge=0,
    le=65_536,
    description="intermediate widths get zeros up to a multiple of this; 0: they stay",
)

Precision = Literal["float32", "bfloat16"]  # of matmuls; see qtool.streaming.precision
PRECISIONS = get_args(Precision)


class Calibration(Table):
    """What the model reads while its activations are measured."""

    source: str | None = Field(
        default=None,
        description="text, JSON or Parquet (texts, chats), CSV, YAML of several, hub dataset; "
        "default: pydoc_data.topics",
    )
    samples: int = Field(default=128, ge=1, le=1_000_000)
    length: int = Field(default=512, ge=8, le=1_048_576, description="tokens per sample")
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    precision: Precision = Field(
        default="float32",
        description="of matmuls over the text; bfloat16: faster on CPUs with AMX",
    )


def bounds(key: str) -> tuple[int, int]:
    """The least and the largest value of a number of the calibration."""
    limits: dict[str, int] = {}
    for one in Calibration.model_fields[key].metadata:
        limits |= {
            name: value for name in ("ge", "le") if (value := getattr(one, name, None)) is not None
        }
    return limits["ge"], limits["le"]


def said_of(precision: Precision) -> dict[str, Any]:
    """What a record of a calibration says of it: nothing of float32, which it ever was."""
    return {} if precision == "float32" else {"precision": precision}


def recorded(keys: dict[str, Any]) -> dict[str, Any]:
    """A recipe's keys as records have them: of a precision there is a word where it is another, and
    of padding where there is some."""
    if keys["calibration"]["precision"] == "float32":
        del keys["calibration"]["precision"]
    if not keys["pad_intermediate"]:
        del keys["pad_intermediate"]
    return keys


def conflict(path: str, message: str) -> PydanticCustomError:
    """An error of the whole recipe that is told as one of the key `path`."""
    return PydanticCustomError("conflict", "{message}", {"path": path, "message": message})


def did_you_mean(value: object, known: Iterable[str], most: int = 1) -> str:
    """The question after a value of a closed set that is misspelled; nothing where none is like it.

    In any case of letters, as people type them.
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(value.lower(), names, most) if isinstance(value, str) else ()
    return f"did you mean {', '.join(names[name] for name in near)}?" if near else ""


def folders() -> list[Path]:
    """Where shipped recipes lie: inside the installed package, or beside it in a checkout."""
    return [path for root in qtool.__path__ if (path := Path(root) / "recipes").is_dir()]


def shipped() -> dict[str, Path]:
    """Name to file of every shipped recipe, sorted by name."""
    found = {path.stem: path for folder in folders() for path in folder.glob("*.yaml")}
    return dict(sorted(found.items()))


def find(name_or_path: str) -> Path:
    """The file of a shipped recipe, whose name may be in any case of letters, or of a path."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    names = shipped()
    name = name_or_path.lower()
    name = ALIASES.get(name, name)
    if name in names:
        return names[name]
    if path.is_file():
        return path
    if path.is_dir():
        raise _is_folder(name_or_path, path)
    near = difflib.get_close_matches(name, names, 3, 0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise RecipeError(
        f"recipe {name_or_path!r} does not exist: {hint}`qtool recipes` lists them; "
        "a file of your own ends in .yaml"
    )


def _is_folder(given: str, path: Path) -> RecipeError:
    """What to give in place of a folder."""
    inside = sorted(one.name for one in path.glob("*.yaml"))
    more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
    there = f" in it, such as {', '.join(inside[:3])}{more}" if inside else ""
    return RecipeError(
        f"{given}: is a folder, not a recipe; name a .yaml file{there}, or a shipped recipe, as "
        "`qtool recipes` lists them"
    )


def read(path: Path) -> str:
    """The text of a recipe file."""
    if path.is_dir():
        raise _is_folder(str(path), path)
    try:
        with path.open("rb") as file:
            raw = file.read(yaml_source.MAX_BYTES + 1)
        return raw.decode()
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe file") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start})") from None


def document(text: str, origin: str, sets: Sequence[str] = ()) -> Document:
    """The keys of a recipe with `sets` ("weights.bits=3") put over them."""
    found = yaml_source.parse(text, origin)
    if not isinstance(found.value, dict):
        raise RecipeError(f"{origin}:1: a recipe is a mapping of keys such as `method: awq`")
    for item in sets:
        _apply(found, item)
    return found


def validate(model: type[AnyTable], source: Document) -> AnyTable:
    """The recipe that `source` says."""
    try:
        # Through JSON, whose strict mode takes a list for a tuple and nothing else by kindness.
        return model.model_validate_json(json.dumps(source.value))
    except ValidationError as error:
        raise RecipeError(_explain(error, source, model)) from None


def _apply(source: Document, item: str) -> None:
    """Put one --set item into the document."""
    key, equals, text = item.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        raise RecipeError(f"--set {item}: expected key=value, such as calibration.samples=64")
    if len(steps) > yaml_source.MAX_DEPTH:
        most = yaml_source.MAX_DEPTH
        raise RecipeError(f"--set {item[:80]}: nested more than {most} levels deep")
    origin = f"{SET} {item}"
    given = yaml_source.parse(text, origin, lines=False)
    path: yaml_source.Path = ()
    for position, step in enumerate(steps):
        table = source.at(path)
        last = position == len(steps) - 1
        if isinstance(table, dict):
            path = (*path, step)
            if last:
                table[step] = given.value
            elif table.get(step) is None:
                if steps[position + 1].isdecimal():  # no table has a number for a key
                    raise RecipeError(
                        f"{origin}: {'.'.join(steps[: position + 1])} has no item "
                        f"{steps[position + 1]}; give it as a list, such as --set "
                        "'overrides=[{match: \"*v_proj*\", dense: true}]'"
                    )
                table[step] = {}
                source.where[path] = origin
        elif isinstance(table, list):
            if not step.isdecimal() or int(step) >= len(table):
                raise RecipeError(f"{origin}: {'.'.join(steps[:position])} has no item {step}")
            path = (*path, int(step))
            if last:
                table[int(step)] = given.value
        else:
            raise RecipeError(f"{origin}: {'.'.join(steps[:position])} is a value, not a mapping")
    source.where.update({path + inner: origin for inner in ((), *given.where)})


def _explain(error: ValidationError, source: Document, model: type[Table]) -> str:
    """The first problem, as one sentence: file:line: key: what is wrong."""
    problems = error.errors(include_url=False)
    # A misspelled key is also one that is missing; the spelling is what has to be told.
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    # And which keys there are hangs on the format.
    format_ = [problem for problem in problems if problem["type"] == "literal_error"]
    problem = ([p for p in format_ if p["loc"] == ("format",)] or unknown or problems)[0]
    path = _place(problem, source)
    context = problem.get("ctx", {})
    if problem["type"] == "conflict":
        path = (str(context["path"]),)
        message = str(context["message"])
    elif problem["type"] == "extra_forbidden":
        known = _keys(model, path[:-1])
        name, colon, rest = str(path[-1]).partition(":")
        near = did_you_mean(name, known)
        if colon and name in known:
            near = f"YAML wants a blank after the colon, as in `{name}: {rest.strip()}`;"
        message = f"unknown key; {f'{near} ' if near else ''}known: {', '.join(known)}"
        if len(path) == 1 and (here := meant(name, gguf="type" in known)):
            message = f"unknown key; in a recipe of qtool it is {here}"
        elif len(path) == 1 and name in foreign_keys(gguf := "type" in known):
            others = "formats other than gguf" if gguf else "GGUF files, which say `format: gguf`"
            message = f"a key of recipes for {others}; remove it, or change `format`"
    elif problem["type"] == "missing":
        message = "missing; a recipe must say it"
    else:
        # Of a value that may be of several kinds, each has something to say.
        said = [p["msg"] for p in problems if _place(p, source) == path]
        message = " or ".join(word[:1].lower() + word[1:] for word in said)
        message = message.replace(" or input should be ", " or ")
        message = message.replace("a valid array", "a list").replace("an object", "a mapping")
        value = source.at(path)
        names = _closed(problem["type"], context)
        if path == ("format",):
            names.append("gguf")
        near = did_you_mean(value, names, 3)
        if near and "known" in context:
            message = "no such type"  # there are dozens
        if isinstance(value, (bool, int, float, str)):
            message += f", found {json.dumps(value)}"
        if path == ("format",):
            message += "; or gguf, which has keys of its own"
        if path == ("method",) and "type" in model.model_fields:
            message = message.replace(" or a list", " or [gptq, tune]")
            message += "; AWQ's scales are `transforms: [awq]` in a GGUF recipe"
        message += f"; {near}" if near else ""
    key = ".".join(str(step) for step in path)
    where = source.locate(path)
    return f"{where}: {key}: {message}" if key else f"{where}: {message}"


def _place(problem: ErrorDetails, source: Document) -> tuple[int | str, ...]:
    """Of the value that is wrong; pydantic goes on to the kind that it might have been."""
    path = tuple(problem["loc"])
    if problem["type"] not in ("missing", "extra_forbidden"):
        while len(path) > 1 and not isinstance(source.at(path[:-1]), dict | list):
            path = path[:-1]
    return path


def _closed(kind: str, context: Mapping[str, Any]) -> list[str]:
    """The values that a problem says there are; none where it knows of no closed set."""
    if kind == "literal_error":
        return re.findall(r"'([^']+)'", str(context["expected"]))
    return str(context["known"]).split(", ") if "known" in context else []


def _keys(model: type[Table], path: tuple[str | int, ...]) -> list[str]:
    """The keys that the table at `path` knows."""
    for step in path:
        if isinstance(step, str):
            model = _table(model.model_fields[step].annotation) or model
    return list(model.model_fields)


def _table(annotation: Any) -> type[Table] | None:
    """The table inside an annotation such as tuple[Override, ...] or Weights | None."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _table(inner))), None)
