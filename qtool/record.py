"""Names in qtool.json, the record of how an artifact was made, for who writes and who reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError
from qtool.formats import safetensors_file as st

FILE_NAME = "qtool.json"
LAYERS = "layers"  # name, scheme, relative_error and of what, of each quantized matrix
FILES = "files"  # of the artifact, each with its SHA-256
CARD = "README.md"  # which people write in; no engine reads it
OUTLIERS = "outliers"  # columns of inputs that LLM.int8() keeps apart


def record_in(folder: Path) -> tuple[Mapping[str, Any] | None, str]:
    """The qtool.json of a folder, None without one; and why it cannot be read, where that is so."""
    file = folder / FILE_NAME
    try:
        return (st.read_json(file) if file.is_file() else None), ""
    except QtoolError as error:
        return None, str(error).replace(str(file), FILE_NAME)


def without_layers(record: Mapping[str, Any]) -> dict[str, Any]:
    """A qtool.json as it is shown to people: without a line for each layer, and for each file."""
    shown = {key: value for key, value in record.items() if key not in (LAYERS, OUTLIERS, FILES)}
    if isinstance(source := shown.get("source"), Mapping) and "files" in source:
        shown["source"] = {key: value for key, value in source.items() if key != "files"}
    return shown
