"""`quantize --provenance` states what the artifact was made of, whatever became of it since."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_here import hub_here
from typer.testing import CliRunner

from qtool import api, hub
from qtool.cli.main import app

FIRST, SECOND = "1" * 40, "2" * 40
BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json")


def stated(
    monkeypatch: pytest.MonkeyPatch, model: str, recipe: str, out: Path, then: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """The inputs by name, where `then` happens between the run and its statement."""
    quantize = api.quantize

    def quantized(*arguments: Any, **more: Any) -> Any:
        made = quantize(*arguments, **more)
        then()
        return made

    with monkeypatch.context() as patched:
        patched.setattr(api, "quantize", quantized)
        words = ["quantize", model, "--recipe", recipe, "--provenance", "-o", str(out)]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(out.with_name(f"{out.name}.provenance.json").read_text())
    listed = found["predicate"]["buildDefinition"]["resolvedDependencies"]
    return {one["name"]: one for one in listed}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for path in hub.tiny_folder().iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, folder)
    return folder


def test_a_branch_that_moved(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(source, newer)
    for name in BESIDE:
        (newer / name).write_text((newer / name).read_text() + "\n")
    with hub_here(monkeypatch, tmp_path, {"ann/m": source}, {"ann/m": FIRST}) as server:

        def move() -> None:
            server.repositories["ann/m"], server.commits["ann/m"] = newer, SECOND
            server.requests.clear()

        found = stated(monkeypatch, "ann/m", "w4g128-rtn", tmp_path / "out", move)
        assert server.requests == []
    assert {"model.safetensors", *BESIDE} <= set(found)
    for name, one in found.items():
        assert one["uri"] == f"hf://ann/m@{FIRST}/{name}"
        assert one["digest"]["sha256"] == digest(source / name)


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "q8_0"])
def test_a_folder_that_was_edited(
    recipe: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: digest(path) for path in source.iterdir()}

    def edit() -> None:
        for name in BESIDE:
            (source / name).write_text((source / name).read_text() + "\n")
        (source / "more.json").write_text("{}")

    out = tmp_path / ("out.gguf" if recipe == "q8_0" else "out")
    found = stated(monkeypatch, str(source), recipe, out, edit)
    assert {name: one["digest"]["sha256"] for name, one in found.items()} == before
