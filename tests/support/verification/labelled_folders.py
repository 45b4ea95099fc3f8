"""Folders whose config.json says of a model what it is not."""

import json
import shutil
from pathlib import Path
from typing import Any

from qtool import tiny
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.runs.quantizing import quantize

TINY = Path(tiny.__file__).parent


def said(folder: Path, check: str, **more: Any) -> list[Finding]:
    return [one for one in verify_artifact(folder, **more).findings if one.check == check]


def dense(folder: Path, **changes: Any) -> Path:
    """The shipped model with other settings; None leaves one out."""
    folder.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(TINY / name, folder / name)
    config = json.loads((TINY / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


RECIPES = {
    "awq": ("w4g128-rtn", "format=awq"),
    "gptq": ("w4g64-rtn", "format=gptq", "weights.symmetric=true"),
    "fp8": ("fp8-dynamic",),
    "blocks": ("fp8-block-hf",),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("mxfp4",),
    "int8": ("int8-llmint8",),
    "mlx": ("w4g64-mlx-rtn",),
}


def copy_of(kind: str, made: Path, to: Path) -> Path:
    """A sound artifact of its own."""
    if not (made / kind).exists():
        recipe, *sets = RECIPES[kind]
        quantize(TINY, recipe, made / kind, *sets)
        (made / kind / "qtool.json").unlink()  # which would tell, too
    return Path(shutil.copytree(made / kind, to))


def label(folder: Path, **changes: Any) -> Path:
    """Other settings in quantization_config; None leaves one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    table = config["quantization_config"] | changes
    config["quantization_config"] = {k: v for k, v in table.items() if v is not None}
    path.write_text(json.dumps(config))
    return folder


def errors(folder: Path, engine: str | None = None) -> list[tuple[str, str]]:
    found = verify_artifact(folder, engine=engine).findings
    return [(one.check, one.message) for one in found if one.severity == "error"]
