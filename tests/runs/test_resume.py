"""A run that dies goes on where it stopped, and ends with the bytes of one that did not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qtool
from qtool.errors import ResumeError
from qtool.messages.progress import Progress
from qtool.quantizing.pipeline import run
from qtool.recipe.recipe import Recipe, load
from qtool.runs import gguf_resume
from qtool.runs.request import Request
from qtool.workspaces import program
from support.runs.killed_runs import KILLED, Died, damage, dying
from support.runs.quantizing import caller, files, text_file
from support.runs.resumed_runs import GGUF, SMALL, content, died, model, quantize, text, tiny

__all__ = ["model", "text", "tiny"]

TUNED = "w4g128-awq-gptq-tune"
SAFETENSORS = ["w4g128-rtn", "w4g128-gptq", "w4g128-awq", "w4g128-awq-gptq", TUNED]


def some(*recipes: str) -> list[Any]:
    """One that does both, and one that tunes as well, stand for those that do a part of it."""
    slow = ("w4g128-gptq", "w4g128-awq")
    return [pytest.param(r, marks=[pytest.mark.slow] if r in slow else []) for r in recipes]


@pytest.mark.parametrize("recipe", some(*SAFETENSORS))
def test_progress_begins_where_the_work_does(
    recipe: str, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken over is neither shown as done now nor part of the estimate."""
    shown: list[int] = []
    blocks = Progress.blocks

    def seen(progress: Progress, *given: int, **more: int) -> Iterator[int]:
        for index in blocks(progress, *given, **more):
            shown.append(index)
            yield index

    out = tmp_path / "out"
    died(model, recipe, out, text, 2, monkeypatch)
    finished = [
        json.loads(line.split(b" ", 1)[1]).get("done", "")
        for line in (tmp_path / ".out.partial" / "journal").read_bytes().splitlines()
    ]
    monkeypatch.setattr(Progress, "blocks", seen)
    quantize(model, recipe, out, text)
    assert shown[0] == sum(name.startswith("block ") for name in finished) > 0


@pytest.mark.parametrize("recipe", some(*SAFETENSORS, *GGUF))
def test_dying_after_every_step(
    recipe: str, model: Path, tiny: Path, text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each try gets a step further, so every step is once the last one and once the first."""
    if recipe == "iq2_xs":  # a large tensor is several steps; of `tiny` only the words are
        monkeypatch.setattr(gguf_resume, "UNIT_PIECES", 1)
    source = tiny if recipe in GGUF else model
    quantize(source, recipe, tmp_path / "whole", text)
    out = tmp_path / "out"
    each = 5 if recipe in GGUF else 1  # a tensor is a step there, and there are many
    tries = 0
    while not out.exists():
        tries += 1
        assert tries < 30
        with monkeypatch.context() as patched:
            written = dying(each, patched)
            try:
                quantize(source, recipe, out, text, threads=1)
            except Died:
                assert written() == each and not out.exists()
    assert tries >= 4
    assert content(out) == content(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ("w4g128-rtn", "artifact"),
        ("w4g128-rtn", "journal"),
        pytest.param("w4g128-awq", "artifact", marks=pytest.mark.slow),
        ("w4g128-awq", "journal"),
        pytest.param("w4g128-awq", "hidden", marks=pytest.mark.slow),
        (TUNED, "originals"),
        (TUNED, "hidden"),
        ("q4_k_m", "artifact"),
        ("q4_k_m", "journal"),
    ],
)
def test_what_is_damaged_is_done_again(
    recipe: str,
    what: str,
    model: Path,
    tiny: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bit of what was written, of the journal, or of the states that were kept, turns over."""
    source = tiny if recipe in GGUF else model
    quantize(source, recipe, tmp_path / "whole", text)
    out = tmp_path / "out"
    folder = died(source, recipe, out, text, 10 if recipe in GGUF else 3, monkeypatch)
    states = {"hidden": folder, "originals": folder / "originals"}.get(what)
    kept = [folder / what] if states is None else [*states.glob("hidden-*")]
    kept = [one / "model.safetensors" if one.is_dir() else one for one in kept]
    assert kept
    for path in kept:
        for place in (1, 3, 5):
            damage(path, path.stat().st_size * place // 8)
    quantize(source, recipe, out, text)
    assert content(out) == content(tmp_path / "whole")


def test_rotations_learned_on_another_text_are_not_taken_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed just after they were learned; the text then changes under its name."""
    text, out = text_file(tmp_path / "text.txt"), tmp_path / "out"
    sets = ["transforms=[rotate]", "rotate.kind=learned", "rotate.steps=2"]
    sets += [f"calibration.source={text}", *SMALL, "weights.group_size=32"]
    loaded = load("w4g128-rtn", sets)
    assert isinstance(loaded, Recipe)
    request = Request(str(model), model, loaded, out, None, 1, 1 << 30)
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(1, patched)
        run(request, Progress(quiet=True))
    assert (tmp_path / ".out.partial" / "rotations").is_file()
    text_file(text, seed=1)
    with pytest.raises(ResumeError, match="calibration text: digest has other content"):
        run(request, Progress(quiet=True))


def test_another_run_is_not_gone_on_with(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of work are neither mixed with others nor thrown away unasked."""
    out = tmp_path / "out"
    folder = died(model, "w4g128-gptq", out, text, 2, monkeypatch)
    before = files(folder)
    kept = r"out: an unfinished run \(2 steps\) is kept beside it \(\.out\.partial\).*"
    with pytest.raises(ResumeError, match=kept + "recipe was w4g128-gptq, is w4g128-awq; give its"):
        quantize(model, "w4g128-awq", out, text)
    assert files(folder).keys() == before.keys()
    other = text_file(tmp_path / "other.txt", seed=1)
    with pytest.raises(ResumeError, match=rf"{kept}this command with --calibration {text} goes on"):
        quantize(model, "w4g128-gptq", out, other)
    weights = model / "model.safetensors"
    times = weights.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with pytest.raises(
        ResumeError, match=r"source: model\.safetensors was written to since; .*--fresh"
    ):
        quantize(model, "w4g128-gptq", out, text)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    quantize(model, "w4g128-rtn", out, text, fresh=True)
    quantize(model, "w4g128-rtn", tmp_path / "whole", text)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "q4_k_m"])
def test_another_qtool_does_not_go_on(
    recipe: str, tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same version, but other code, whose bytes may be others."""
    out = tmp_path / "out"
    died(tiny, recipe, out, text, 1, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(program, "code", lambda: "0" * 64)
        said = "qtool itself has changed since, though not its version; .* --fresh starts over"
        with pytest.raises(ResumeError, match=said):
            quantize(tiny, recipe, out, text)
    assert (tmp_path / ".out.partial/journal").is_file()
    quantize(tiny, recipe, out, text)
    quantize(tiny, recipe, tmp_path / "whole", text)
    assert content(out) == content(tmp_path / "whole")


def test_what_would_go_on_is_said_and_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed, then typed with other options: the sentence names them, and how to go on."""
    out, text = tmp_path / "out", text_file(tmp_path / "text.txt")
    words = ["quantize", model, "--recipe", "w4g128-gptq", "--set", "weights.group_size=32", "-o",
             out, "--calibration", text, "--length", "48", "--samples"]  # fmt: skip
    call = caller(monkeypatch, capfd)
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(1, patched)
        call(*words, "4")
    refused = call(*words, "3", "--max-shard-size", "1MB")
    said = refused.err
    assert refused.status == 1 and "the same command goes on" not in said, said
    assert "calibration.samples was 4, is 3, size of a shard was 5000000000, is 1000000" in said
    options = said.split("this command with ")[1].split(" goes on with it")[0]
    assert options == "--samples 4 --max-shard-size 5000000000"
    done = call(*words, *options.split()[1:])
    assert done.status == 0 and "going on with an earlier run" in done.err


def test_kill_9(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real thing: the lock is free again, the folder is found, --json tells of nothing else."""
    out = tmp_path / "out"
    words = ["quantize", model, "--recipe", "w4g128-rtn", "--set", "weights.group_size=32",
             "-o", out, "--json"]  # fmt: skip
    home = Path(qtool.__file__).parent.parent
    killed = [sys.executable, "-c", KILLED, *map(str, words)]
    ended = subprocess.run(killed, cwd=home, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    assert (tmp_path / ".out.partial" / "journal").read_bytes().count(b'"done"') == 1
    done = caller(monkeypatch, capfd)(*words)
    assert done.status == 0, done.err
    assert json.loads(done.out)["artifact"] == str(out)
    quantize(model, "w4g128-rtn", tmp_path / "whole", model / "none")
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}
