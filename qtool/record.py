"""Names in qtool.json, the record of how an artifact was made, for who writes and who reads it, and
in statistics of a model; and what people are told of both."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from qtool.errors import QtoolError
from qtool.formats import safetensors_file as st

FILE_NAME = "qtool.json"
LAYERS = "layers"  # name, scheme, relative_error and of what, of each quantized matrix
FILES = "files"  # of the artifact, each with its SHA-256
CARD = "README.md"  # which people write in; no engine reads it
REQUANTIZED = "requantized_from"  # of a source: how its matrices are stored
OUTLIERS = "outliers"  # columns of inputs that LLM.int8() keeps apart
CALIBRATION = "qtool.calibration"  # in GGUF files, what a folder has in qtool.json
# Keys of GGUF files.
CHECKSUM_KEY = "qtool.source_checksum"  # of the weights that were read; known after the run
RECIPE_KEY = "qtool.recipe"
SCALES_KEY = "qtool.scales"  # that transforms put into the source, as JSON
ENVIRONMENT_KEY = "qtool.environment"  # of a rotated file: what its bytes depend on
STATISTICS = "qtool.statistics"  # in the metadata of a file of them: sites and their readers
_MOST = 1e9  # of a setting
_LONGEST = 200  # characters of a value that is told in a sentence
_FARTHER = ("guided", "gptaq", "yaqa")  # gptq's settings that look beyond the rows of a matrix


def record_in(folder: Path) -> tuple[Mapping[str, Any] | None, str]:
    """The qtool.json of a folder, None without one; and why it cannot be read, where that is so."""
    file = folder / FILE_NAME
    try:
        if file.is_file():
            return st.read_json(file), ""
        return None, "it is no file" if os.path.lexists(file) else ""
    except QtoolError as error:
        return None, str(error).replace(str(file), FILE_NAME)


def made_by(recipe: object) -> str | None:
    """A recorded recipe's name, and what it does to weights in order; None where it is no recipe's
    record. Whoever wrote it, of any version: what is not understood is left out."""
    if not isinstance(recipe, Mapping) or not isinstance(recipe.get("name"), str):
        return None
    chain = _names(recipe.get("transforms"))
    chain += [one for one in _names(recipe.get("method")) if one not in chain]
    settings = recipe.get("gptq")
    found = [(key, settings.get(key)) for key in _FARTHER] if isinstance(settings, Mapping) else []
    told = ", ".join(f"{key} {one}" for key, one in found if _counts(one))
    steps = [
        f"gptq ({told})" if told and one == "gptq" else one
        for one in chain
        if one not in ("none", "rtn")  # goes without saying
    ]
    own = recipe.get("overrides")
    more = ""
    if isinstance(own, list) and own:
        more = f", with {len(own)} override" + "s" * (len(own) > 1)
    return f"recipe {recipe['name']}" + (f": {', then '.join(steps)}" if steps else "") + more


def calibrated_on(found: object) -> tuple[str, dict[str, Any]] | None:
    """A recorded calibration in words, how much, of what, and how, and what these leave out of it;
    None where it is no record of one. Whoever wrote it: what is not understood is left out."""
    if not isinstance(found, Mapping):
        return None
    samples, length = found.get("samples"), found.get("length")
    if not _is_count(samples) or not _is_count(length):
        return None
    words, told = (
        f"{samples:,} sample{'s' * (samples != 1)} of {length:,} tokens",
        {"samples", "length"},
    )
    source, seed, precision = (found.get(key) for key in ("source", "seed", "precision"))
    if isinstance(source, str) and 0 < len(source) <= _LONGEST:
        words += " of a file" if source == "file" else f" of {source}"
        told.add("source")
    if _is_count(seed):
        words += f", seed {seed}"
        told.add("seed")
    if isinstance(precision, str) and 0 < len(precision) <= _LONGEST:
        words += f", matmuls in {precision}"
        told.add("precision")
    return words, {key: value for key, value in found.items() if key not in told}


def is_statistics(metadata: Mapping[str, str], names: Iterable[str]) -> bool:
    """Whether a safetensors file is what `qtool calibrate` measured of a model, and no model."""
    return STATISTICS in metadata and all(name.startswith("site.") for name in names)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST * 10


def _names(value: object) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [one for one in listed if isinstance(one, str)]


def _counts(value: object) -> bool:
    """Whether a setting is a number of which something is done."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < _MOST


def without_layers(record: Mapping[str, Any]) -> dict[str, Any]:
    """A qtool.json as it is shown to people: without a line for each layer, and for each file."""
    shown = {key: value for key, value in record.items() if key not in (LAYERS, OUTLIERS, FILES)}
    if isinstance(source := shown.get("source"), Mapping) and "files" in source:
        shown["source"] = {key: value for key, value in source.items() if key != "files"}
    return shown
