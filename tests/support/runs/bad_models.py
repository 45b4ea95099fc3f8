"""Commands that fail: a model to damage, and what is left and said."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from support.runs import quantizing
from support.runs.quantizing import Call, Called

RECIPES = ("w4g128-rtn", "w4g128-gptq", "w4g128-awq")
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model, and good.txt inside of it."""
    folder = quantizing.build("llama", tmp_path_factory.mktemp("original"))
    quantizing.text_file(folder / "good.txt", 8000)
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def arguments(model: Path, recipe: str, out: Path, *more: object) -> list[str]:
    small = ["--samples", 4, "--length", 64]
    small += [] if "--calibration" in more else ["--calibration", model / "good.txt"]
    group = ["--set", "weights.group_size=32"]
    return [str(a) for a in ("quantize", model, "--recipe", recipe, *group, *small, *more,
                             "-o", out)]  # fmt: skip


def snapshot(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


KEPT = "what is finished is kept ("


def assert_goes_on(
    said: Called, tmp_path: Path, before: set[str], call: Call, arguments: list[str]
) -> None:
    """What a run left is hidden and said, and once the cause is gone the same command goes on."""
    left = snapshot(tmp_path) - before
    assert all(path.startswith(".out.partial") for path in left)
    assert (KEPT in said.err) == bool(left)
    assert call(*arguments).status == 0
    assert not any(path.startswith(".") for path in snapshot(tmp_path))


def assert_one_sentence(said: Called, *parts: str, status: int = 1) -> None:
    """The exit status, nothing on stdout, and one `error: ` line that holds `parts`."""
    assert said.status == status and said.out == ""
    lines = said.err.splitlines()
    if lines and lines[-1].startswith(KEPT):
        lines.pop()
    assert lines and lines[-1].startswith("error: "), said.err
    # Notes of the plan and lines of progress may come before it, and nothing else.
    usual = ("note: ", "warning: ", "  block ")
    before = [line for line in lines[:-1] if not line.startswith(usual)]
    assert not before, said.err
    assert "Traceback" not in said.err
    for part in parts:
        assert part in lines[-1], said.err


def replace(model: Path, name: str, index: tuple[int, ...], value: float, dtype: Any) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name].astype(dtype)
    tensors[name][index] = value
    save_file(tensors, model / "model.safetensors")
