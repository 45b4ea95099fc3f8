"""Where an artifact comes from, how it is made again, and how engines load it."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.artifacts.artifact import Artifact
from qtool.engine_commands import COMMANDS
from qtool.gguf.inspect import GgufInspection
from qtool.gguf.source import GgufSource
from qtool.record import without_layers
from qtool.report.facts import Loading
from qtool.verification.engines.rules import engine_findings

_MOST = 400  # characters of a value
# What others write about themselves, of a GGUF file's metadata.
_GGUF_KEYS = (
    "general.name", "general.author", "general.organization", "general.version",
    "general.quantized_by", "general.base_model.0.name", "general.base_model.0.repo_url",
    "general.license", "general.architecture",
)  # fmt: skip
_COMMANDS = COMMANDS | {
    "transformers": 'AutoModelForCausalLM.from_pretrained({!r}, device_map="auto")'
}


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """An object of JSON as labels, joined with dots, and values; what is empty is left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        if value:
            yield prefix, short(", ".join(map(str, value)))
    elif value not in (None, ""):
        yield prefix, short(str(value))


def short(text: str) -> str:
    """At most a few lines."""
    return text if len(text) <= _MOST else f"{text[:_MOST]}... ({len(text):,} characters)"


def of_artifact(artifact: Artifact) -> tuple[list[tuple[str, str]], str, dict[str, Any] | None]:
    """Rows, a sentence, and the recipe where the artifact records one."""
    record = artifact.provenance
    config = artifact.checkpoint.config.get("quantization_config")
    rows = list(flat(without_layers(record or {})))
    recipe = record.get("recipe") if record is not None else None
    if record is not None and "qtool_version" in record:
        said = "Made by qtool; this is the record that lies inside it (qtool.json)."
    else:
        said = "Nothing in it says who made it; this is what its config says."
        if artifact.unreadable:
            said = f"Its record cannot be read ({artifact.unreadable}); {said[0].lower()}{said[1:]}"
        rows += flat(config if isinstance(config, Mapping) else {}, "quantization_config")
        rows = rows[:60]
    return rows, said, recipe if isinstance(recipe, dict) else None


def of_gguf(found: GgufInspection) -> tuple[list[tuple[str, str]], str, dict[str, Any] | None]:
    """The same of a GGUF file."""
    record = found.keys_under("qtool.")
    recipe = _parsed(record.get("recipe"))
    rows = [(key, text) for key in _GGUF_KEYS if (text := found.text(key)) is not None]
    for key, value in record.items():
        if key == "recipe" and recipe is not None:
            rows += flat(recipe, "recipe")
        else:
            rows += flat(value, key)
    rows += flat(found.keys_under("quantize.imatrix."), "importance")
    rows = [(label, short(value)) for label, value in rows]
    if "version" in record:
        return rows, "Made by qtool; this is what its metadata records.", recipe
    return rows, "Nothing in it says that qtool made it; this is what its metadata says.", recipe


def _parsed(text: Any) -> dict[str, Any] | None:
    if not isinstance(text, str):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested objects as dotted keys with what is at their ends."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping):
            yield from leaves(inner, f"{name}.")
        else:
            yield name, inner


def loading(model: Artifact | GgufSource, path: str) -> tuple[Loading, ...]:
    """Each engine's command, and what it has against the artifact."""
    engines: tuple[str, ...] = ("vllm", "sglang", "transformers")
    if isinstance(model, GgufSource):
        engines = ("llama.cpp",)
    elif model.found.format == "mlx":
        engines = ("mlx-lm",)
    rows = []
    for engine in engines:
        found = engine_findings(model, engine, 1)
        reasons = tuple(one.message for one in found if one.severity == "error")
        remarks = tuple(one.message for one in found if one.severity != "error")
        shown = path if engine == "transformers" else shlex.quote(path)
        rows.append(Loading(engine, _COMMANDS[engine].format(shown), reasons, remarks))
    return tuple(rows)
