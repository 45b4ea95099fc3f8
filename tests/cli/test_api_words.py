"""What the functions of `qtool` say that is no error: of their arguments, not of options."""

import json
from pathlib import Path

import pytest

import qtool
from qtool.api.words import retold
from qtool.errors import SourceError
from qtool.report.compared import Compared
from support.runs.quantizing import text_file

TEXT = "calibrated on Python's own documentation, which is good for trying only; "


def test_notes_of_what_was_made(tmp_path: Path) -> None:
    found = qtool.quantize("tiny", "w4g128-awq", tmp_path / "a", samples=2, length=32)
    (note,) = [one for one in found.notes if one.startswith(TEXT)]
    assert note.startswith(f"{TEXT}calibration FILE takes a text like yours, or one that `qtool s")
    assert note in found.json()["notes"] and "--calibration" not in json.dumps(found.json())


def test_warnings_of_a_plan(tmp_path: Path) -> None:
    text = text_file(tmp_path / "t.txt", 8000)
    found = qtool.plan("tiny", "w4g128-gptq", calibration=text, samples=1000)
    (warning,) = [one for one in found.warnings if one.startswith("the calibration text")]
    assert warning.endswith("fewer or shorter samples (samples, length)")
    assert warning in found.json()["warnings"]
    # Options of engines stay.
    assert any(one.endswith("unless told --dtype float16") for one in found.notes)


def test_findings(tmp_path: Path) -> None:
    qtool.quantize("tiny", "w4g128-rtn", tmp_path / "a")
    for found in (
        qtool.verify(tmp_path / "a", engine="vllm", tp=16),
        qtool.plan("tiny", "w4g128-rtn", engine="vllm", tp=16),
    ):
        said = json.dumps(found.json()["findings"])
        assert "use tp=" in said and "--tp" not in said


def test_what_is_said_on_the_way(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And what the log keeps of it."""
    log = tmp_path / "log"
    given = {"quiet": False, "log_file": str(log), "stats": tmp_path / "s"}
    from qtool.cli.main import main

    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit):
        words = ["calibrate", "tiny", "--samples", "1", "--length", "32", "-o", given["stats"]]
        patched.setattr("sys.argv", ["qtool", *map(str, words)])
        main()
    capfd.readouterr()
    qtool.quantize("tiny", "w8-rtn", tmp_path / "a", **given)
    said = "note: stats is not used: recipe w8-rtn looks at no activations"
    assert said in capfd.readouterr().err.splitlines()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["event"] for one in events][0 :: len(events) - 1] == ["begin", "end"]
    assert said in [one.get("text") for one in events]


def test_errors_that_are_given() -> None:
    failed = {Path("a"): SourceError("a: give --against")}
    found = retold(Compared("b", (), failed), lambda text: text.replace("--against", "against"))
    assert found.json()["failed"] == [{"artifact": "a", "error": "a: give against"}]
