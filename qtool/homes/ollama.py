"""Ollama's store of models, and the Modelfile that takes a GGUF file into it.

    manifests/registry.ollama.ai/library/NAME/TAG   JSON: {"layers": [{"mediaType", "digest"}]}
    manifests/HOST/OWNER/NAME/TAG                   likewise
    blobs/sha256-HEX                                a layer; the one of the model is a GGUF file

The store is OLLAMA_MODELS, or ~/.ollama/models, or the service's own /usr/share/ollama/.ollama.
Source: Ollama's docs (modelfile.md, import.md).
"""

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError, SourceError
from qtool.formats.safetensors_header import read_json

_MODEL = "application/vnd.ollama.image.model"
_LIBRARY = ("registry.ollama.ai", "library")
_SERVICE = Path("/usr/share/ollama/.ollama/models")
# Key under general.sampling. -> Ollama's parameter.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
}
# Ollama knows many chat templates by their text, tools included; one that it does not, it drops.
_CHATML = "<|im_start|>"
_CHATML_TEMPLATE = (
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n"
)
# Ends of turns of common chat templates: a model that is not told stops at them.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
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


def modelfile_path(artifact: Path) -> Path:
    """Where the Modelfile of a GGUF file lies."""
    return artifact.with_name(f"{artifact.name.removesuffix('.gguf')}.Modelfile")


def create_line(artifact: Path) -> str:
    """The command that takes a GGUF file into the store."""
    name = re.sub(r"[^a-z0-9._-]", "-", artifact.name.removesuffix(".gguf").lower())
    return f"ollama create {name} -f {shlex.quote(str(modelfile_path(artifact)))}"


def modelfile_text(artifact: Path) -> str:
    """A Modelfile for a GGUF file that lies beside it.

    Sampling defaults and the ends of turns stand as PARAMETER, and ChatML without tools as
    TEMPLATE; other chat templates are left to Ollama, which looks into the file.
    """
    from qtool.formats.gguf_file import GgufFile

    with GgufFile.open(artifact) as file:
        metadata = file.metadata
        lines = [f"FROM ./{artifact.name}"]
        for key, parameter in _SAMPLING.items():
            value = metadata.get(f"general.sampling.{key}")
            if value is not None and isinstance(value.value, int | float):
                lines.append(f"PARAMETER {parameter} {value.value:g}")
        template = metadata.get("tokenizer.chat_template")
        text = template.value if template is not None else None
        if isinstance(text, str):
            if _CHATML in text and "tool" not in text:
                lines.append(f'TEMPLATE """{_CHATML_TEMPLATE}"""')
            lines += [f'PARAMETER stop "{end}"' for end in _ENDS if end in text]
    return "\n".join(lines) + "\n"


def is_modelfile_of(artifact: Path) -> bool:
    """Whether what lies beside a GGUF file is its Modelfile, unchanged."""
    path = modelfile_path(artifact)
    with suppress(QtoolError, OSError):
        return not path.is_symlink() and path.read_bytes() == modelfile_text(artifact).encode()
    return False


def write_modelfile(artifact: Path) -> Path:
    """FILE.Modelfile beside FILE.gguf."""
    path = modelfile_path(artifact)
    path.write_text(modelfile_text(artifact), encoding="utf-8")
    return path
