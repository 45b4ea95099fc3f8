"""The log file: a line of JSON for each event."""

import json
from pathlib import Path

import pytest

from qtool.errors import SourceError
from qtool.messages.progress import Progress


def events(path: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(isinstance(line.pop("time"), float) for line in lines)
    return lines


def test_events_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    progress = Progress(quiet=True, log=log)
    with progress.logged("quantize", model="tiny"):
        progress.say("a warning")
        with progress.stage("quantize"):
            assert [*progress.blocks(3, first=1)] == [1, 2]
    found = events(log)
    assert [line["event"] for line in found] == ["begin", "message", "step", "step", "stage", "end"]
    assert found[0]["command"] == "quantize" and found[0]["model"] == "tiny"
    assert found[1]["text"] == "a warning"
    assert found[3] == {"event": "step", "kind": "block", "done": 3, "of": 3}
    assert found[4]["name"] == "quantize"
    assert capfd.readouterr() == ("", "")


def test_a_failure_is_logged_with_its_sentence(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    progress = Progress(quiet=True, log=log)
    with pytest.raises(SourceError), progress.logged("quantize"):
        error = SourceError("x: no such file")
        error.add_note("what is finished is kept")
        raise error
    failed = events(log)[-1]
    assert failed["error"] == "x: no such file" and failed["notes"] == ["what is finished is kept"]
    with pytest.raises(KeyboardInterrupt), progress.logged("quantize"):
        raise KeyboardInterrupt
    assert events(log)[-1]["error"] == "KeyboardInterrupt"


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    progress = Progress(quiet=True, log=tmp_path / "none" / "log.jsonl")
    with pytest.raises(SourceError, match=r"log\.jsonl: the log cannot be written"):
        progress.event("begin")


def test_a_log_that_can_be_written_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Told once; what the work ends with is still its own error, with its notes."""
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "log.jsonl"
    progress = Progress(quiet=True, log=log)
    error = SourceError("x: no such file")
    error.add_note("what is finished is kept")
    with pytest.raises(SourceError) as ended, progress.logged("quantize"):
        log.unlink()
        (tmp_path / "logs").rmdir()
        progress.say("a warning")
        progress.say("another")
        raise error
    assert ended.value is error and error.__notes__ == ["what is finished is kept"]
    said = capfd.readouterr().err
    assert said == (
        f"warning: {log}: the log cannot be written (No such file or directory); the work goes on "
        "without it\n"
    )
