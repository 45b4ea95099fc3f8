"""Where an artifact comes from, as the `qtool.json` inside it.

Nothing in it depends on the clock, on names of folders or on the number of threads: the same
inputs give the same record. What a calibrated or rotated artifact's bytes do depend on, the kind of
CPU, the GPU if one was used, and the versions of torch and numpy, is recorded for those only;
rounding to nearest gives the same bytes everywhere.
"""

import platform
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

from qtool import __version__, hub
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.safetensors_header import read_json
from qtool.provenance.outcome import Outcome
from qtool.recipe.portable import portable
from qtool.recipe.recipe import Recipe
from qtool.record import FILE_NAME, LAYERS, OUTLIERS, REQUANTIZED

SCHEMA = 1
_CPU_KEYS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


def record(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model: str,
    outcome: Outcome,
    max_shard_bytes: int | None = None,
    gpu: str | None = None,
) -> dict[str, Any]:
    """The provenance of a finished run. `model` is what the user typed.

    max_shard_bytes: where it is not the usual one. gpu: what did the work, if not the CPU.
    """
    asked: dict[str, Any] = {}
    if recipe.changes:
        asked["set"] = list(recipe.changes)
    if max_shard_bytes is not None:
        asked["max_shard_bytes"] = max_shard_bytes
    return {
        "schema": SCHEMA,
        "qtool_version": __version__,
        "recipe": {"name": recipe.name, **portable(recipe, outcome.calibration)},
        **asked,
        "source": {
            # Not config.json's _name_or_path: that of a fine-tune may be its base model.
            "name": hub.public_name(model, checkpoint.folder),
            "digest": f"sha256:{checkpoint.digest()}",
            "files": {name: f"sha256:{one}" for name, one in checkpoint.file_digests.items()},
            **made_from(checkpoint),
            **({} if (stored := checkpoint.stored_as) is None else {REQUANTIZED: stored}),
        },
        "calibration": outcome.calibration,
        "notes": list(outcome.notes),
        "environment": with_gpu(gpu) if recipe.depends_on_cpu else None,
        **_outliers(recipe, outcome),
        LAYERS: [
            # Four digits: the last ones of a sum depend on the threads that it was made by.
            {
                "name": layer.name,
                "scheme": layer.scheme,
                "relative_error": float(f"{layer.relative_error:.4g}"),
                "of": layer.of,
            }
            for layer in outcome.layers
            if isfinite(layer.relative_error)
        ],
    }


def _outliers(recipe: Recipe, outcome: Outcome) -> dict[str, Any]:
    """What LLM.int8() will keep in float16, as far as the calibration text shows it."""
    if not recipe.reports_outliers:
        return {}
    found = [
        {**asdict(report), "largest": float(f"{report.largest:.4g}")} for report in outcome.outliers
    ]
    return {OUTLIERS: {"threshold": recipe.llm_int8.threshold, "inputs": found}}


def made_from(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the source was itself made of something else, such as a GGUF file: what that was."""
    beside = checkpoint.folder / FILE_NAME
    made = read_json(beside).get("made_from") if beside.is_file() else None
    return {} if made is None else {"made_from": made}


def with_gpu(gpu: str | None) -> dict[str, str]:
    """environment(), and what did the work, if not the CPU."""
    return environment() if gpu is None else {**environment(), "gpu": gpu}


def environment() -> dict[str, str]:
    """What the bytes of a calibrated or rotated artifact depend on beside its inputs."""
    found = {package: _installed(package) for package in ("torch", "numpy", "transformers")}
    return {"cpu": cpu_kind()} | {name: one for name, one in found.items() if one is not None}


@cache
def _installed(package: str) -> str | None:
    """Its version, or None; looked up once, which takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_kind() -> str:
    """The machine and the CPU's model, such as "x86_64 GenuineIntel 6 143"."""
    parts = [platform.machine()]
    seen = set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in _CPU_KEYS and key.strip() not in seen:
            seen.add(key.strip())
            parts.append(value.strip())
    if len(parts) == 1 and platform.processor() not in ("", parts[0]):
        parts.append(platform.processor())
    return " ".join(parts)
