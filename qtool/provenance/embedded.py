"""What an artifact records of its own making: `qtool.json` in a folder, `qtool.*` keys in GGUF.

Both say the same under other names, and here it is read under one. Nothing in it is believed: a
record comes from a file that anybody may have written.
"""

import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.checkpoints.gguf_models import gguf_models, is_gguf
from qtool.checkpoints.weight_files import refuse_matrix
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.safetensors_header import parse_json, read_json
from qtool.recipe.file import PRECISIONS
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe, parse
from qtool.record import CALIBRATION, FILE_NAME, REQUANTIZED

_KINDS = {str: "a text", int: "an integer"}
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Embedded:
    """The record of one artifact."""

    path: Path
    is_folder: bool
    version: str  # of qtool
    recipe: Mapping[str, Any]  # every key, and `name`
    changes: tuple[str, ...]  # the `--set` items among them
    source: str | None  # a name that means the same on every machine
    digest: str | None  # sha256:... of the source; None in GGUF files
    files: Mapping[str, str]  # sha256:... of each file of the source, by name
    checksum: str | None  # of the source's weights, in GGUF files; not cryptographic
    calibration: Mapping[str, Any] | None
    environment: Mapping[str, Any] | None  # where bytes depend on it
    imatrix: str | None  # the name of the importance matrix that was given
    requantized: bool
    max_shard_bytes: int | None  # where it is not the usual one

    @property
    def from_statistics(self) -> bool:
        """Whether it was calibrated by a file of statistics (`quantize --stats`)."""
        return self.is_folder and (self.calibration or {}).get("error_aware") is False

    def keys(self, calibration: str | None = None) -> dict[str, Any]:
        """The keys that a file of the recipe has to have. calibration: the file that the record
        calls `file`."""
        keys = {key: value for key, value in self.recipe.items() if key != "name"}
        settings = keys.get("calibration")
        if calibration is not None and isinstance(settings, Mapping):
            keys["calibration"] = {**settings, "source": calibration}
        # Keys that a recipe names have to act; those that it left to their defaults have not.
        least = {"method": "none", "format": "dense"} if self.is_folder else {
            key: keys.get(key) for key in ("format", "type")}  # fmt: skip
        usual = parse(json.dumps(least), f"{self.path}: its recipe", self._name).effective()
        return {key: keys.get(key) for key in least} | _unusual(keys, usual)

    def load(self, calibration: str | None = None) -> Recipe | GgufRecipe:
        """The recipe again; RecipeError where this version knows no such recipe."""
        text = json.dumps(self.keys(calibration))
        return parse(text, f"{self.path}: its recipe", self._name).named(self._name, self.changes)

    @property
    def _name(self) -> str:
        return str(self.recipe["name"])


def read(path: Path) -> Embedded:
    """The record of an artifact; UnsupportedError where it has none, as those of others."""
    if is_gguf(path):
        return _of_gguf(path)
    folder = path if path.is_dir() else path.parent
    file = folder / FILE_NAME
    if path.is_file() and path.suffix != ".safetensors":
        raise UnsupportedError(
            f"{path}: is no artifact; name a folder or a .gguf file that `qtool quantize` made"
        )
    if not file.is_file():
        refuse_matrix(folder)
        raise UnsupportedError(f"{path}: has no {FILE_NAME}, so nothing says how it was made")
    record = read_json(file)
    if record.get("conversions"):
        raise UnsupportedError(
            f"{path}: was made by `qtool convert`; what it was converted from can be made again, "
            "and converted"
        )
    source = record.get("source")
    if not isinstance(source, Mapping):
        raise UnsupportedError(f"{path}: {FILE_NAME} names no source, so it cannot be made again")
    shards = record.get("max_shard_bytes")
    return Embedded(
        path,
        True,
        str(record.get("qtool_version")),
        _recipe(path, record.get("recipe")),
        tuple(item for item in _list(record.get("set")) if isinstance(item, str)),
        _text(source.get("name")),
        _text(source.get("digest")),
        {key: str(value) for key, value in (_table(source.get("files")) or {}).items()},
        None,
        _calibration(f"{path}: {FILE_NAME}: calibration", record.get("calibration")),
        _table(record.get("environment")),
        None,
        REQUANTIZED in source,
        shards if isinstance(shards, int) and shards > 0 else None,
    )


def _of_gguf(path: Path) -> Embedded:
    with closing(GgufFile.open(gguf_models(path)[0])) as file:
        keys = {
            key: value.value
            for key, value in file.metadata.items()
            if key.startswith(("qtool.", "quantize.imatrix."))
        }
    for key in ("qtool.recipe", "qtool.version"):
        if key not in keys:
            raise UnsupportedError(f"{path}: has no {key}, so nothing says how it was made")
    recipe = parse_json(str(keys["qtool.recipe"]).encode(), f"{path}: qtool.recipe")
    said = {
        key: parse_json(str(keys[key]).encode(), f"{path}: {key}")
        for key in (CALIBRATION, "qtool.environment")
        if key in keys
    }
    where = f"{path}: {CALIBRATION}"
    calibration = _calibration(where, said.get(CALIBRATION))
    return Embedded(
        path,
        False,
        str(keys["qtool.version"]),
        _recipe(path, recipe),
        (),
        _text(keys.get("qtool.source")),
        None,
        {},
        _text(keys.get("qtool.source_checksum")),
        calibration,
        _table((calibration or {}).get("environment") or said.get("qtool.environment")),
        _text(keys.get("quantize.imatrix.file")),
        "qtool.requantized_from" in keys,
        None,
    )


def _recipe(path: Path, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise FormatError(f"{path}: records no recipe that has a name; it was not made by qtool")
    return found


def _calibration(where: str, found: Any) -> Mapping[str, Any] | None:
    """What was measured on, with each value one that a recipe may have; FormatError if not."""
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise FormatError(f"{where} is {_shown(found)}; expected an object, as qtool writes")
    for key, kind in (("source", str), ("digest", str), ("samples", int), ("length", int),
                      ("seed", int)):  # fmt: skip
        if type(found.get(key)) is not kind:
            raise FormatError(
                f"{where}.{key} is {_shown(found.get(key))}; expected {_KINDS[kind]}, as qtool "
                "writes"
            )
    for key, (least, most) in {
        "samples": (1, 1_000_000),
        "length": (1, 1_048_576),
        "seed": (0, 2**32 - 1),
    }.items():
        if not least <= found[key] <= most:
            raise FormatError(
                f"{where}.{key} is {_shown(found[key])}; expected {least} to {most}, as qtool "
                "writes"
            )
    if not _DIGEST.fullmatch(found["digest"]) or "\0" in found["source"]:
        key = "source" if "\0" in found["source"] else "digest"
        raise FormatError(f"{where}.{key} is {_shown(found[key])}, which qtool never writes")
    if found.get("precision", "float32") not in PRECISIONS:
        raise FormatError(
            f"{where}.precision is {_shown(found['precision'])}; expected {' or '.join(PRECISIONS)}"
        )
    if not isinstance(found.get("error_aware", False), bool):
        raise FormatError(
            f"{where}.error_aware is {_shown(found['error_aware'])}; expected true or false"
        )
    return found


def _shown(found: Any) -> str:
    return json.dumps(found)[:50]


def _unusual(keys: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose values are not the usual ones, those of tables one by one."""
    found = {}
    for key, value in keys.items():
        known = usual.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            if inner := _unusual(value, known):
                found[key] = inner
        elif key not in usual or value != known:
            found[key] = value
    return found


def _text(found: Any) -> str | None:
    return found if isinstance(found, str) else None


def _table(found: Any) -> Mapping[str, Any] | None:
    return found if isinstance(found, Mapping) else None


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []
