"""`qtool doctor`: what it says, what it advises, and what it keeps to itself."""

import json
import platform
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from qtool import __version__, doctor, schemas
from qtool.cli.main import app
from qtool.errors import UnsupportedError
from qtool.native import library


def run() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    Draft202012Validator(json.loads(schemas.text("doctor"))).validate(found)
    assert isinstance(found, dict)
    return found


def test_what_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = run()
    assert found["qtool"] == __version__
    assert found["packages"]["numpy"] and found["packages"]["torch"]
    assert found["simd"]["used"] == library.selected()
    assert found["simd"]["available"] == library.available()
    assert found["engines"]["llama.cpp"] == str(program)
    assert found["engines"]["transformers"] == found["packages"]["transformers"]
    assert 0 < found["available_memory_bytes"] <= found["memory_bytes"]


def test_a_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert run()["hub"]["token"] is False
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://me:pass@hub.example/x")
    for asked in (["doctor"], ["doctor", "--json"]):
        said = CliRunner().invoke(app, asked).output
        assert "secret" not in said and "pass" not in said and "hub.example" in said
    assert run()["hub"]["token"] is True


def test_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage)
    monkeypatch.setattr(doctor, "memory", lambda: (8 << 30, 1 << 30))
    monkeypatch.setattr(library, "selected", lambda: "scalar")
    said = " ".join(run()["advice"])
    for part in ("HF_HUB_OFFLINE is set", "the hub cache has 0.0 GiB free", "`--max-ram` bounds"):
        assert part in said
    if len(library.available()) > 1:
        assert "QTOOL_SIMD chooses scalar" in said


class _Usage:
    free = 1


def test_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("the kernel library is not at x; install the package")

    monkeypatch.setattr(library, "library", missing)
    found = run()
    assert found["simd"]["library"] is None and "install the package" in found["simd"]["problem"]
    assert "nothing is quantized" in " ".join(found["advice"])


@pytest.mark.parametrize("amx", [False, True])
def test_amx(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_amx", lambda: amx)
    found = run()
    assert found["simd"]["amx"] is amx
    assert any("calibration.precision=bfloat16" in said for said in found["advice"]) is amx
    assert ("the CPU has AMX" in CliRunner().invoke(app, ["doctor"]).output) is amx


def test_amx_is_told_where_torch_has_it() -> None:
    from qtool.streaming.precision import has_bfloat16

    if platform.machine() == "x86_64" and has_bfloat16():
        assert doctor._amx()
