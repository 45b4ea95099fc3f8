"""What was finished when its run was killed is not made again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qtool
from support.runs.killed_runs import damage
from support.runs.quantizing import caller, files, text_file
from support.runs.resumed_runs import GGUF, content, died, model, quantize, text, tiny

__all__ = ["model", "text", "tiny"]

KILLED_NAMED = """
import os, shutil, signal, sys
from qtool.cli.main import main
from qtool.workspaces import naming, workspace
def kill(*_): os.kill(os.getpid(), signal.SIGKILL)
if sys.argv.pop(1) == "named":
    give_name = naming.give_name
    naming.give_name = lambda *given: (give_name(*given), kill())
else:  # while what was kept to go on with is removed
    workspace.remove = lambda folder: (os.unlink(folder / "journal"), kill())
main()
"""


def killed_named(moment: str, words: list[object]) -> None:
    home = Path(qtool.__file__).parent.parent
    killed = [sys.executable, "-c", KILLED_NAMED, moment, *map(str, words)]
    ended = subprocess.run(killed, cwd=home, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr


def untouched(path: Path) -> tuple[int, int, int]:
    """What is another once something is written; when it was read last does not count."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize(
    ("recipe", "moment"),
    [
        ("w4g128-rtn", "named"),
        ("w4g128-gptq", "removing"),
        ("q4_k_m", "named"),
        ("iq2_xs", "removing"),
    ],
)
def test_what_was_finished_when_it_was_killed_is_not_made_again(
    recipe: str, moment: str, model: Path, tiny: Path, text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The same command says what it would have said, once; nothing that is there is touched."""
    gguf = recipe in GGUF
    source, out = tiny if gguf else model, tmp_path / ("out.gguf" if gguf else "out")
    words: list[object] = ["quantize", source, "--recipe", recipe, "-o", out, "--json"]
    words += [] if gguf else ["--set", "weights.group_size=32"]
    if recipe in ("w4g128-gptq", "iq2_xs"):
        words += ["--calibration", text, "--samples", "4", "--length", "48"]
    killed_named(moment, words)
    made = [(path, untouched(path)) for path in (out, *out.rglob("*"))]
    call = caller(monkeypatch, capfd)
    done = call(*words)
    assert done.status == 0, done.err
    assert [(path, untouched(path)) for path, _ in made] == made
    said = json.loads(done.out)
    told = [note for note in said["notes"] if "it was finished already" in note]
    assert len(told) == 1 and said["artifact"] == str(out)
    assert os.listdir(tmp_path) == [out.name]
    again = call(*words)
    assert again.status == 1 and "exists" in again.err
    whole = tmp_path / out.name.replace("out", "whole")
    other = json.loads(call(*[whole if word == out else word for word in words]).out)
    assert content(out) == content(whole)
    differ = ("seconds", "peak_rss_bytes", "artifact")
    said |= {key: other[key] for key in differ} | {
        "notes": [note for note in said["notes"] if note not in told]
    }
    assert said == other


def test_texts_that_were_finished_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own.jsonl"
    words: list[object] = ["sample", "tiny", "-o", out, "--samples", 2, "--length", 16]
    killed_named("named", [*words, "--threads", 1])
    made = untouched(out)
    call = caller(monkeypatch, capfd)
    other = call(*words, "--threads", 1, "--seed", 1)
    assert other.status == 1 and "exists" in other.err and untouched(out) == made
    out.unlink()
    killed_named("named", [*words, "--threads", 1])
    made = untouched(out)
    done = call(*words, "--threads", 1)
    assert done.status == 0 and "it was finished already" in done.err, done.err
    assert f"{out}: 48 tokens in 3 texts (1 more than" in done.out and untouched(out) == made
    assert os.listdir(tmp_path) == [out.name]


@pytest.mark.parametrize("what", ["recipe", "source", "text", "artifact", "fresh", "replace"])
def test_what_another_command_had_finished_is_in_the_way(
    what: str, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model, source)
    text = text_file(tmp_path / "text.txt")
    words: list[object] = ["quantize", source, "--recipe", "w4g128-gptq", "--set",
             "weights.group_size=32", "-o", out, "--calibration", text, "--samples", "4",
             "--length", "48"]  # fmt: skip
    killed_named("named", words)
    if what in ("source", "artifact"):
        weights = (source if what == "source" else out) / "model.safetensors"
        damage(weights, weights.stat().st_size - 5)
    elif what == "text":
        text_file(text, seed=1)
    before = files(out)
    more = {
        "fresh": ["--fresh"],
        "recipe": ["--set", "gptq.damp_percent=0.02"],
        "replace": ["--replace", "--set", "gptq.damp_percent=0.02"],
    }
    done = caller(monkeypatch, capfd)(*words, *more.get(what, []))
    assert "it was finished already" not in done.out
    if what == "replace":
        assert done.status == 0 and files(out) != before, done.err
    else:
        assert done.status == 1 and files(out) == before
        assert f"{out}: the output folder exists and is not empty" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"model", "text.txt", "out"}


def test_what_lies_beside_the_weights_is_that_of_now(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the source that were there before the kill and are others, or gone, after it."""
    source, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model, source)
    code = {**json.loads((source / "config.json").read_text()), "auto_map": {"AutoModel": "own.A"}}
    (source / "config.json").write_text(json.dumps(code))
    gone = ("chat_template.jinja", "additional_chat_templates/rag.jinja", "LICENSE", "own.py")
    changed = ("generation_config.json", "tokenizer_config.json", "other.py")
    (source / "additional_chat_templates").mkdir()
    for name in (*gone, *changed):
        (source / name).write_text("{}")
    folder = died(source, "w4g128-rtn", out, text, 2, monkeypatch)
    for name in (*gone, *changed):
        (folder / "artifact" / name).parent.mkdir(exist_ok=True)
        (folder / "artifact" / name).write_text("of another time")
    for name in gone:
        (source / name).unlink()
    for name in changed:
        (source / name).write_text('{"do_sample": false}')
    quantize(source, "w4g128-rtn", out, text)
    quantize(source, "w4g128-rtn", tmp_path / "whole", text)
    assert content(out) == content(tmp_path / "whole")
    assert all((out / name).read_text() == '{"do_sample": false}' for name in changed)
    assert not any((out / name).exists() for name in gone)
