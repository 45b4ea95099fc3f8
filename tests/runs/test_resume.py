"""A run that dies goes on where it stopped, and ends with the bytes of one that did not."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qtool
from qtool.errors import ResumeError
from qtool.gguf import resume as gguf_resume
from qtool.gguf.quantize import run_gguf
from qtool.gguf.request import GgufRequest
from qtool.recipe.recipe import Recipe, load
from qtool.runs import program
from qtool.runs.pipeline import run
from qtool.runs.progress import Progress
from qtool.runs.request import Request
from qtool.runs.summary import Summary
from support.runs.killed_runs import KILLED, Died, damage, dying
from support.runs.quantizing import build, caller, files, first_blocks_of_tiny, text_file

SMALL = ["calibration.samples=4", "calibration.length=48"]
TUNED = "w4g128-awq-gptq-tune"
SAFETENSORS = ["w4g128-rtn", "w4g128-gptq", "w4g128-awq", "w4g128-awq-gptq", TUNED]
GGUF = ["q4_k_m", "iq2_xs"]


def some(*recipes: str) -> list[Any]:
    """One that does both, and one that tunes as well, stand for those that do a part of it."""
    slow = ("w4g128-gptq", "w4g128-awq")
    return [pytest.param(r, marks=[pytest.mark.slow] if r in slow else []) for r in recipes]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of it."""
    return first_blocks_of_tiny(tmp_path_factory.mktemp("tiny") / "model", 2)


def quantize(
    model: Path, recipe: str, out: Path, text: Path, *, fresh: bool = False, threads: int = 2
) -> Summary:
    sets = [f"calibration.source={text}", *SMALL]
    if recipe.startswith("w"):
        sets.append("weights.group_size=32")
    if "awq" in recipe:
        sets.append("awq.grid=4")
    if "awq-gptq" in recipe:  # slopes are steps of their own: test_row_feedback_runs.py
        sets.append("gptq.yaqa=0")
    if "tune" in recipe:
        sets.append("tune.steps=3")
    loaded = load(recipe, sets)
    progress = Progress(quiet=True)
    if isinstance(loaded, Recipe):
        request = Request(str(model), model, loaded, out, None, threads, 1 << 30, fresh)
        return run(request, progress)
    return run_gguf(GgufRequest(str(model), model, loaded, out, threads, fresh=fresh), progress)


def content(out: Path) -> dict[str, bytes] | bytes:
    return files(out) if out.is_dir() else out.read_bytes()


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


def died(
    model: Path, recipe: str, out: Path, text: Path, after: int, patch: pytest.MonkeyPatch
) -> Path:
    """A run that died after some steps; its hidden folder."""
    with patch.context() as patched, pytest.raises(Died):
        dying(after, patched)
        quantize(model, recipe, out, text, threads=1)
    return out.with_name(f".{out.name}.partial")


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


KILLED_NAMED = """
import os, shutil, signal, sys
from qtool.cli.main import main
from qtool.runs import naming, workspace
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
