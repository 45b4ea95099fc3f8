"""`quantize --provenance` states what the artifact was made of, whatever became of it since."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import qtool
from qtool import hub
from qtool.cli.main import app
from qtool.errors import UnsupportedError
from qtool.provenance import statement
from qtool.verification.run import verify_artifact
from qtool.workspaces import naming
from support.hub.hub_here import hub_here

FIRST, SECOND = "1" * 40, "2" * 40
BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json")


def stated(
    monkeypatch: pytest.MonkeyPatch, model: str, recipe: str, out: Path, then: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """The inputs by name, where `then` happens between the run and its statement."""
    text = statement.text

    def written(*arguments: Any) -> Any:
        then()
        return text(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(statement, "text", written)
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


KILLED = """
import os, signal, sys
from qtool.cli.main import main
from qtool.workspaces import naming
give_name = naming.give_name
def killed(*given):
    if os.environ["MOMENT"] == "after":
        give_name(*given)
    os.kill(os.getpid(), signal.SIGKILL)
naming.give_name = killed
main()
"""


@pytest.mark.parametrize(("recipe", "moment"), [("w4g64-rtn", "before"), ("q8_0", "after")])
def test_killed_about_when_the_artifact_gets_its_name(
    moment: str, recipe: str, tmp_path: Path
) -> None:
    """An artifact is never there without the statement that was asked for."""
    home = Path(qtool.__file__).parent.parent
    out = tmp_path / ("out.gguf" if recipe == "q8_0" else "out")
    words = ["quantize", "tiny", "--recipe", recipe, "--provenance", "-o", str(out)]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *words],
        cwd=home,
        env={**os.environ, "MOMENT": moment},
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -9, killed.stderr
    assert out.exists() == (moment == "after")
    if moment == "before":
        said = CliRunner().invoke(app, words, catch_exceptions=False)
        assert said.exit_code == 0 and "going on with an earlier run" in said.stderr
    verdict = verify_artifact(out)
    assert verdict.ok and "statement" in verdict.checks and not statement.unlike(out)


def test_no_statement_of_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(naming, "give_name", full)
    with pytest.raises(UnsupportedError, match="disk is full"):
        qtool.quantize("tiny", "w8-rtn", tmp_path / "out", provenance=True)
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]


def test_a_statement_of_an_earlier_artifact_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "out", tmp_path / "log.jsonl"
    qtool.quantize("tiny", "w8-rtn", out, provenance=True, log_file=log)
    assert "note:" not in capfd.readouterr().err
    assert json.loads(log.read_text().splitlines()[0])["event"]
    shutil.rmtree(out)
    qtool.quantize("tiny", "w4g64-rtn", out, quiet=False)
    assert "out.provenance.json is of an earlier out" in capfd.readouterr().err
    assert not verify_artifact(out).ok
    qtool.convert(out, "gptq-v2", tmp_path / "other")
    assert "note:" not in capfd.readouterr().err
    qtool.convert(tmp_path / "other", "awq", out, replace=True, quiet=False)
    assert "out.provenance.json is of an earlier out" in capfd.readouterr().err
    shutil.rmtree(out)
    qtool.quantize("tiny", "w4g64-rtn", out, quiet=False, provenance=True)
    assert "is of an earlier" not in capfd.readouterr().err and verify_artifact(out).ok
    (tmp_path / "b.provenance.json").mkdir()
    with pytest.raises(UnsupportedError, match="a folder is in the way"):
        qtool.quantize("tiny", "w8-rtn", tmp_path / "b", provenance=True)
