"""The commands that make an artifact again, from what it records of its own making.

What is not recorded has a word in its place: MODEL for a source of this machine, FILE for a text.
A recipe that is no shipped one, or not as this version ships it, is written into a file first. No
line is shown that does not mean the recipe of the record: it is read again, and compared.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError
from qtool.provenance.embedded import Embedded, read
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe, load, parse, shipped
from qtool.texts.source import TOPICS

_FILE_NAME = re.compile(r"\w[\w.+-]{0,80}", re.ASCII)
_TEXT = "calibration.source"
_STATISTICS = "STATISTICS"


@dataclass(frozen=True)
class _Way:
    """How a command line says which recipe."""

    recipe: str
    changes: tuple[tuple[str, Any], ...]  # put over it, after those that the record names
    text: str = ""  # of the file that has to be there


def commands(path: Path, typed: str) -> list[str]:
    """The command lines for the artifact at `path`, typed so; none where nothing is recorded, or
    this version knows no such recipe."""
    try:
        record = read(path)
        wanted = _settings(record.load(), record)
    except QtoolError:
        return []
    for way_of in (_shipped, _own):
        try:
            way = way_of(record, wanted)
        except QtoolError:
            continue
        if way is not None:
            return _lines(way, record, typed)
    return []


def _measured_before(record: Embedded) -> bool:
    return record.from_statistics or record.imatrix is not None


def _settings(recipe: Recipe | GgufRecipe, record: Embedded) -> dict[str, Any]:
    """What a command line has to say: of calibration nothing where a file of sums is given."""
    found = recipe.effective()
    if _measured_before(record):
        del found["calibration"]
    return found


def _shipped(record: Embedded, wanted: Mapping[str, Any]) -> _Way | None:
    """A recipe of this version, with what the record has otherwise. A folder's record names all
    that `--set` changed: anything else means that the recipe was a file of the same name."""
    name = str(record.recipe["name"])
    if name not in shipped():  # a name from a file may be a path to anything
        return None
    usual = _settings(load(name, record.changes), record)
    way = _Way(name, tuple(_changed(usual, wanted)))
    if record.is_folder and any(not key.startswith("calibration.") for key, _ in way.changes):
        return None
    return way if _settings(load(name, _sets(way, record)), record) == wanted else None


def _own(record: Embedded, wanted: Mapping[str, Any]) -> _Way | None:
    """A file of the name that the user's had."""
    name = str(record.recipe["name"])
    if not _FILE_NAME.fullmatch(name):
        return None
    keys = record.keys()
    calibration = dict(keys.pop("calibration", {}))
    source = calibration.pop("source", None)
    changes = () if source is None or _measured_before(record) else ((_TEXT, source),)
    if calibration and not _measured_before(record):
        keys["calibration"] = calibration
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    way = _Way(f"{name}.yaml", changes, text)
    found = parse(text, way.recipe, name, _sets(way, record))
    return way if _settings(found, record) == wanted else None


def _changed(
    usual: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Keys whose values are not the usual ones, those of tables one by one."""
    for key, value in wanted.items():
        known = usual.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            yield from _changed(known, value, f"{prefix}{key}.")
        elif value != known:
            yield f"{prefix}{key}", value


def _set(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _sets(way: _Way, record: Embedded) -> list[str]:
    return [*record.changes, *(_set(*change) for change in way.changes)]


def _lines(way: _Way, record: Embedded, typed: str) -> list[str]:
    """The recipe's file, statistics, and the command itself."""
    source = record.source or "MODEL"
    lines = [f"cat > {way.recipe} <<'END'\n{way.text}END"] if way.text else []
    words = ["qtool", "quantize", source, "--recipe", way.recipe]
    for change in record.changes:
        words += ["--set", change]
    for key, value in way.changes:
        if key == _TEXT and value is not None:
            words += ["--calibration", "FILE" if value == "file" else value]
        else:
            words += ["--set", _set(key, value)]
    if record.from_statistics:
        lines.append(shlex.join([*_calibrate(way, record, source), "-o", _STATISTICS]))
        words += ["--stats", _STATISTICS]
    if record.imatrix is not None:
        words += ["--imatrix", record.imatrix]
    if record.max_shard_bytes is not None:
        words += ["--max-shard-size", str(record.max_shard_bytes)]
    words += ["--device", "cuda"] if "gpu" in (record.environment or {}) else []
    words += ["--requantize"] if record.requantized else []
    return [*lines, f"{shlex.join(words)} -o {shlex.quote(typed)}"]


def _calibrate(way: _Way, record: Embedded, source: str) -> list[str]:
    """What measures the statistics that were given."""
    known = record.calibration or {}
    text = known.get("source")
    words = ["qtool", "calibrate", source, "--recipe", way.recipe]
    if text == "file":
        words += ["--calibration", "FILE"]
    elif text != TOPICS:
        words += ["--calibration", str(text)]
    for key in ("samples", "length", "seed"):
        words += [f"--{key}", str(known[key])]
    if "precision" in known:
        words += ["--precision", str(known["precision"])]
    words += ["--device", "cuda"] if "gpu" in known else []
    return words
