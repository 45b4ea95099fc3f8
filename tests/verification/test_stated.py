"""verify compares an artifact with the statement beside it, which may say anything."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.errors import SourceError
from qtool.publishing.push import _check_artifact
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from qtool.verification.stated import check_stated
from support.runs.quantizing import Call, first_block_of_tiny


def turn_a_bit(file: Path) -> None:
    """In the last byte but a few: a weight or a scale, which is as good as the right one."""
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("recipe", ["w4g64-rtn", "q8_0"])
def test_a_turned_bit_is_found(recipe: str, tmp_path: Path, call: Call) -> None:
    model = first_block_of_tiny(tmp_path / "model")
    out = tmp_path / ("out.gguf" if recipe == "q8_0" else "out")
    made = call("quantize", model, "--recipe", recipe, "--provenance", "-o", out)
    assert made.status == 0, made.err
    checks = verify_artifact(out).checks
    assert checks[-1] == "statement" and verify_artifact(out).ok
    file = out if out.is_file() else out / "model.safetensors"
    was = hashlib.sha256(file.read_bytes()).hexdigest()
    turn_a_bit(file)
    now = hashlib.sha256(file.read_bytes()).hexdigest()
    said = call("verify", out)
    assert said.status == 1 and f"its SHA-256 is {now}, stated is {was}" in said.out
    own = out.is_dir()  # where qtool.json records digests as well
    assert said.out.count("error (") == 1 + own and f"{file.name} is not the file that" in said.out
    with pytest.raises(SourceError, match="does not pass verify"):
        _check_artifact(out, 1)
    # Without the statement a GGUF file is compared with nothing, and that is said.
    Path(f"{out}.provenance.json").unlink()
    left = verify_artifact(out)
    assert left.ok != own and left.checks == checks[:-1]
    assert [f.severity for f in left.findings] == ["error" if own else "note"]


def artifact(folder: Path) -> Path:
    """Some files, and a statement for each of them."""
    out = folder / "out"
    (out / "templates").mkdir(parents=True)
    for name in ("model.safetensors", "README.md", "templates/chat.jinja"):
        (out / name).write_text(name)
    (folder / "secret").write_text("x")
    return out


def stated(out: Path, subjects: Any) -> list[Finding]:
    statement = out.with_name("out.provenance.json")
    statement.write_text(json.dumps({"subject": subjects}))
    return list(check_stated(out, statement, {}))


def subject(name: str, content: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": hashlib.sha256(content.encode()).hexdigest()}}


def test_files_are_compared_by_their_place_in_the_artifact(tmp_path: Path) -> None:
    out = artifact(tmp_path)
    names = ("model.safetensors", "README.md", "templates/chat.jinja")
    assert not stated(out, [subject(f"out/{name}", name) for name in names])
    assert not stated(out, [subject(f"what-it-was-called/{name}", name) for name in names])
    (gone,) = stated(out, [subject("out/other.safetensors", "")])
    assert gone.severity == "error"
    assert gone.message.startswith(f"{out}/other.safetensors is missing: out.provenance.json ")
    # What a copy was made of may be whole: the copy is named, as it was given.
    (changed,) = stated(out, [subject("what-it-was-called/model.safetensors", "other")])
    assert changed.message.startswith(f"{out}/model.safetensors is not the file that ")
    (card,) = stated(out, [subject("out/README.md", "before it was edited")])
    assert card.severity == "warning"


@pytest.mark.parametrize(
    "name",
    ["../secret", "out/../../secret", "/secret", "out//../../secret", "out/..\\secret", "out",
     "secret", "", "out/\0", "x/" * 5000 + ".."],
)  # fmt: skip
def test_names_stay_in_the_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = artifact(tmp_path)
    monkeypatch.setattr("qtool.verification.stated.hash_file", lambda path: pytest.fail(str(path)))
    (found,) = stated(out, [subject(name, "x")])
    assert found.severity == "error" and "no file of out" in found.message
    assert len(found.message) < 400


@pytest.mark.parametrize(
    ("subjects", "severity", "sentence"),
    [
        (None, "warning", "states no file's SHA-256"),
        ({}, "warning", "states no file's SHA-256"),
        ([], "warning", "states no file's SHA-256"),
        (["x" * 9999], "error", "without a name and a SHA-256: 'xxx"),
        ([{"name": "out/README.md"}], "error", "without a name and a SHA-256"),
        ([{"name": "out/README.md", "digest": {"sha256": "0"}}], "error", "without a name and"),
        ([{"name": ["out"], "digest": {"sha256": "0" * 64}}], "error", "without a name and"),
    ],
)
def test_hostile_statements(subjects: Any, severity: str, sentence: str, tmp_path: Path) -> None:
    (found,) = stated(artifact(tmp_path), subjects)
    assert found.severity == severity and sentence in found.message
    assert len(found.message) < 400


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, read = artifact(tmp_path), []
    monkeypatch.setattr("qtool.verification.stated.hash_file", lambda path: read.append(path) or "")
    names = [f"{first}/README.md" for first in "abc" * 9]
    assert len(stated(out, [subject(name, "") for name in names])) == 27 and len(read) == 1


def dense(path: Path) -> None:
    path.write_bytes(b'{"subject":[' + b"[]," * 2_000_000 + b"0]}")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [(dense, "JSON so dense"), (lambda path: path.write_text("{"), "not valid JSON")],
)
def test_a_statement_that_cannot_be_read(
    make: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    out = artifact(tmp_path)
    make(tmp_path / "out.provenance.json")
    (found,) = check_stated(out, tmp_path / "out.provenance.json", {})
    assert found.severity == "error" and sentence in found.message


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    out = artifact(tmp_path)
    os.mkfifo(out / "pipe")
    (found,) = stated(out, [subject("out/pipe", "")])
    assert "is missing" in found.message
    os.remove(tmp_path / "out.provenance.json")
    os.mkfifo(tmp_path / "out.provenance.json")
    assert "statement" not in verify_artifact(out).checks
