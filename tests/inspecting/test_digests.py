"""qtool.json records the SHA-256 of an artifact's files, and verify compares them with it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from qtool.record import without_layers
from qtool.verification.digests import check_digests
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.runs.quantizing import Call, first_block_of_tiny


def record(out: Path) -> dict[str, Any]:
    found = json.loads((out / "qtool.json").read_text())
    assert isinstance(found, dict)
    return found


def test_what_changed_since_is_named(tmp_path: Path, call: Call) -> None:
    model = first_block_of_tiny(tmp_path / "model")
    out = tmp_path / "out"
    size = ("--max-shard-size", "30KB")
    made = call("quantize", model, "--recipe", "w4g64-rtn", *size, "-o", out)
    assert made.status == 0, made.err
    files = record(out)["files"]
    there = {path.name for path in out.iterdir()}
    assert files.keys() == there - {"qtool.json", "README.md"} and len(there) > 6
    for name, digest in files.items():
        assert digest == f"sha256:{hashlib.sha256((out / name).read_bytes()).hexdigest()}"
    assert "files" not in without_layers(record(out)) and "sha256" not in made.out
    assert digest.removeprefix("sha256:") not in (out / "README.md").read_text()

    out = out.rename(tmp_path / "renamed")
    assert not verify_artifact(out).findings and "digests" in verify_artifact(out).checks
    (out / "README.md").write_text("by hand")
    assert not verify_artifact(out).findings
    shards = sorted(out.glob("*.safetensors"))
    turned = bytearray(shards[1].read_bytes())
    turned[-4] ^= 1
    shards[1].write_bytes(turned)
    (found,) = verify_artifact(out).findings
    assert (found.severity, found.check, found.name) == ("error", "digests", shards[1].name)
    assert hashlib.sha256(turned).hexdigest() in found.message
    # One shard by itself is looked at alone.
    assert verify_artifact(shards[1]).findings[0] == found
    assert not [f for f in verify_artifact(shards[0]).findings if f.check == "digests"]

    turned[-4] ^= 1
    shards[1].write_bytes(turned)
    config = out / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"note": 1}))
    (edited,) = verify_artifact(out).findings
    assert (edited.severity, edited.name) == ("warning", "config.json")


def test_tensors_that_were_stored_anew(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"a")
    said = check_digests(tmp_path, {"model.safetensors": f"sha256:{'0' * 64}"}, {})
    gone, new = said
    assert (gone.severity, gone.name) == ("warning", "model.safetensors")
    assert "is not there" in gone.message and "split anew" in gone.message
    assert (new.severity, new.name) == ("warning", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    "recorded",
    [7, {"../secret": f"sha256:{'0' * 64}"}, {"/etc/passwd": "x"}, {"a.json": None}, {"a\0b": "x"}],
)
def test_records_that_lie(recorded: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "out").mkdir()
    (found,) = check_digests(tmp_path / "out", recorded, {})
    assert found.severity == "error" and "qtool.json" in found.message


def test_artifacts_without_digests(tmp_path: Path, call: Call) -> None:
    """Those of other tools, and of GGUF files: a note, and no more."""
    model = first_block_of_tiny(tmp_path / "model")

    def said_of(artifact: Path) -> list[Finding]:
        verdict = verify_artifact(artifact)
        assert "digests" not in verdict.checks and verdict.ok
        return [f for f in verdict.findings if f.check == "digests"]

    assert not said_of(model)  # nothing is quantized
    out = tmp_path / "out"
    assert call("quantize", model, "--recipe", "w4g64-rtn", "-o", out).status == 0
    (out / "qtool.json").unlink()
    (note,) = said_of(out)
    assert note.severity == "note" and "no qtool.json records any" in note.message
    assert call("quantize", model, "--recipe", "q8_0", "-o", tmp_path / "out.gguf").status == 0
    (note,) = said_of(tmp_path / "out.gguf")
    assert note.severity == "note" and "--provenance" in note.message
    said = call("verify", tmp_path / "out.gguf")
    assert said.status == 0 and said.out.rstrip().endswith("nothing wrong")


def test_what_is_converted_records_its_own(tmp_path: Path, call: Call) -> None:
    model = first_block_of_tiny(tmp_path / "model")
    out = tmp_path / "out"
    assert call("quantize", model, "--recipe", "w4g64-rtn", "-o", out).status == 0
    before = record(out)["files"]
    for target, name in (("gptq-v2", "gptq"), ("hf", "plain")):
        made = call("convert", out, "--to", target, "-o", tmp_path / name)
        assert made.status == 0, made.err
        files = record(tmp_path / name)["files"]
        assert files["model.safetensors"] != before["model.safetensors"]
        assert "digests" in verify_artifact(tmp_path / name).checks
        assert not [f for f in verify_artifact(tmp_path / name).findings if f.check == "digests"]
    gguf = tmp_path / "out.gguf"
    assert call("quantize", model, "--recipe", "f16", "-o", gguf).status == 0
    assert call("convert", gguf, "--to", "hf", "-o", tmp_path / "again").status == 0
    assert "model.safetensors" in record(tmp_path / "again")["files"]
    assert not [f for f in verify_artifact(tmp_path / "again").findings if f.check == "digests"]
