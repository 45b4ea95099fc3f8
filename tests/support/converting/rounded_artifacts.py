"""The first block of `tiny`, rounded to nearest in several formats; other tensors, or labels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from support.converting.converting import artifacts
from support.verification.verifying import forget_digests


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tiny, rounded to nearest in several formats."""
    cases = {
        "asymmetric": ("format=awq",),
        "symmetric": ("format=awq", "weights.symmetric=true", "weights.group_size=32"),
        "channel": ("format=awq", "weights.group_size=-1", "weights.symmetric=true"),
        "eight": ("format=gptq", "weights.bits=8", "weights.symmetric=true"),
        "three": ("format=gptq", "weights.bits=3", "weights.symmetric=true"),
    }
    return artifacts(tmp_path_factory.mktemp("artifacts"), cases)


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Other tensors in a folder, and no digests of those before."""
    forget_digests(folder)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return folder


def relabel(source: Path, out: Path, label: str) -> Path:
    """The same files under another checkpoint_format."""
    out.mkdir()
    for path in source.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = label
    (out / "config.json").write_text(json.dumps(config))
    return out
