"""Ollama's store of models, and the Modelfile that takes a GGUF file into it.

    manifests/registry.ollama.ai/library/NAME/TAG   JSON: {"layers": [{"mediaType", "digest"}]}
    manifests/HOST/OWNER/NAME/TAG                   likewise
    blobs/sha256-HEX                                a layer; the one of the model is a GGUF file

The store is OLLAMA_MODELS, or ~/.ollama/models, or the service's own /usr/share/ollama/.ollama.
Source: Ollama's docs (modelfile.md, import.md).
"""

import os
import re
from pathlib import Path
from typing import Any

from qtool.errors import SourceError
from qtool.formats.safetensors_header import read_json

_MODEL = "application/vnd.ollama.image.model"
_LIBRARY = ("registry.ollama.ai", "library")
_SERVICE = Path("/usr/share/ollama/.ollama/models")
_PART = re.compile(r"[\w][\w.-]*", re.ASCII)
_DIGEST = re.compile(r"sha256[:-][0-9a-f]{64}", re.ASCII)


def stores() -> list[Path]:
    """Folders in which Ollama may keep models, that of the environment alone where it is set."""
    if given := os.environ.get("OLLAMA_MODELS"):
        return [Path(given)]
    return [Path.home() / ".ollama" / "models", _SERVICE]


def stored_model(name: str) -> Path:
    """The GGUF file of a model by Ollama's name for it: NAME[:TAG], [HOST/]OWNER/NAME[:TAG]."""
    manifest = _manifest_path(name)
    for store in stores():
        path = store / "manifests" / manifest
        if path.is_file():
            return _blob(store, path, name)
    looked = " and ".join(map(str, stores()))
    raise SourceError(
        f"ollama:{name}: no such model in {looked}; `ollama list` says what there "
        "is, OLLAMA_MODELS says where"
    )


def _manifest_path(name: str) -> Path:
    whole, _, tag = name.partition(":")
    parts = whole.split("/")
    if not 1 <= len(parts) <= 3 or not all(_PART.fullmatch(one) for one in [*parts, tag or "x"]):
        raise SourceError(f"ollama:{name}: expected ollama:NAME[:TAG], as `ollama list` prints it")
    host_and_owner = [*_LIBRARY[: 3 - len(parts)]]
    return Path(*host_and_owner, *parts, tag or "latest")


def _blob(store: Path, manifest: Path, name: str) -> Path:
    layers = read_json(manifest).get("layers")
    found: list[Any] = [
        layer.get("digest")
        for layer in (layers if isinstance(layers, list) else [])
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL
    ]
    if len(found) != 1 or not isinstance(found[0], str) or not _DIGEST.fullmatch(found[0]):
        raise SourceError(f"{manifest}: names {len(found)} models, expected one with its sha256")
    blob = store / "blobs" / found[0].replace(":", "-")
    if not blob.is_file():
        raise SourceError(f"ollama:{name}: {blob} is missing; `ollama pull {name}` brings it back")
    return blob
