"""A run that dies goes on where it stopped, and ends with the bytes of one that did not."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quantizing import build, caller, files, text_file

import qtool
from qtool.errors import ResumeError, UnsupportedError
from qtool.gguf import resume as gguf_resume
from qtool.gguf.quantize import GgufRequest, run_gguf
from qtool.hub import tiny_folder
from qtool.recipe.recipe import Recipe, load
from qtool.runs.differences import told
from qtool.runs.journal import Journal
from qtool.runs.pipeline import run
from qtool.runs.progress import Progress
from qtool.runs.request import Request
from qtool.runs.summary import Summary
from qtool.runs.workspace import check_free, workspace

SMALL = ["calibration.samples=4", "calibration.length=48"]
SAFETENSORS = ["w4g128-rtn", "w4g128-gptq", "w4g128-awq", "w4g128-awq-gptq"]
GGUF = ["q4_k_m", "iq2_xs"]


class Died(BaseException):
    """As sudden as a signal: nothing catches it."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("model"))


def quantize(
    model: Path, recipe: str, out: Path, text: Path, *, fresh: bool = False, threads: int = 2
) -> Summary:
    sets = [f"calibration.source={text}", *SMALL]
    if recipe.startswith("w"):
        sets.append("weights.group_size=32")
    loaded = load(recipe, sets)
    progress = Progress(quiet=True)
    if isinstance(loaded, Recipe):
        request = Request(str(model), model, loaded, out, None, threads, 1 << 30, fresh)
        return run(request, progress)
    return run_gguf(GgufRequest(str(model), model, loaded, out, threads, fresh=fresh), progress)


def dying(after: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The journal's line number `after` is the last thing a run does; how many it has written."""
    commit, count = Journal.commit, 0

    def counted(journal: Journal, name: str, **content: object) -> None:
        nonlocal count
        if count >= after:
            raise Died
        commit(journal, name, **content)
        count += 1

    monkeypatch.setattr(Journal, "commit", counted)
    return lambda: count


def content(out: Path) -> dict[str, bytes] | bytes:
    return files(out) if out.is_dir() else out.read_bytes()


@pytest.mark.parametrize("recipe", SAFETENSORS)
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


@pytest.mark.parametrize("recipe", [*SAFETENSORS, *GGUF])
def test_dying_after_every_step(
    recipe: str, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try gets a step further, so every step is once the last one and once the first."""
    if recipe == "iq2_xs":  # a large tensor is several steps; of `tiny` only the words are
        monkeypatch.setattr(gguf_resume, "UNIT_PIECES", 1)
    source = tiny_folder() if recipe in GGUF else model
    quantize(source, recipe, tmp_path / "whole", text)
    out = tmp_path / "out"
    each = 9 if recipe in GGUF else 1  # a tensor is a step there, and there are many
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


def damage(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ("w4g128-rtn", "artifact"),
        ("w4g128-rtn", "journal"),
        ("w4g128-awq", "artifact"),
        ("w4g128-awq", "journal"),
        ("w4g128-awq", "hidden"),
        ("q4_k_m", "artifact"),
        ("q4_k_m", "journal"),
    ],
)
def test_what_is_damaged_is_done_again(
    recipe: str,
    what: str,
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bit of what was written, of the journal, or of the states that were kept, turns over."""
    source = tiny_folder() if recipe in GGUF else model
    quantize(source, recipe, tmp_path / "whole", text)
    out = tmp_path / "out"
    folder = died(source, recipe, out, text, 20 if recipe in GGUF else 3, monkeypatch)
    kept = [*folder.glob("hidden-*")] if what == "hidden" else [folder / what]
    kept = [one / "model.safetensors" if one.is_dir() else one for one in kept]
    assert kept
    for path in kept:
        for place in (1, 3, 5):
            damage(path, path.stat().st_size * place // 8)
    quantize(source, recipe, out, text)
    assert content(out) == content(tmp_path / "whole")


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.agree("recipe", {"bits": 4}, "no")
    for name in ("a", "b", "c"):
        journal.commit(name, value=name)
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "journal").write_bytes(whole[:length])
        journal = Journal(tmp_path / "journal")
        lines = whole[:length].count(b"\n")
        assert [*journal.done] == ["a", "b", "c"][: max(0, lines - 1)]
        journal.close()
        assert (tmp_path / "journal").stat().st_size == len(
            b"".join(whole.splitlines(True)[:lines])
        )
    (tmp_path / "journal").write_bytes(whole)
    journal = Journal(tmp_path / "journal")
    journal.forget_from("b")
    assert [*journal.done] == ["a"]
    with pytest.raises(ResumeError, match="other bits"):
        journal.agree("recipe", {"bits": 3}, "other bits")
    journal.commit("d")
    journal.close()
    assert [*Journal(tmp_path / "journal").done] == ["a", "d"]


def test_facts_behind_a_forgotten_unit_are_noted_again(tmp_path: Path) -> None:
    """What a run is made of may be known only after something of it is finished."""
    journal = Journal(tmp_path / "journal")
    journal.agree("recipe", 4, "no")
    journal.commit("importance")
    journal.agree("header", "x", "no")
    journal.close()
    journal = Journal(tmp_path / "journal")
    journal.forget_from("importance")
    journal.agree("header", "y", "no")
    journal.close()
    journal = Journal(tmp_path / "journal")
    assert journal.facts == {"recipe": 4, "header": "y"}
    journal.commit("late")
    journal.forget_from("late")
    with pytest.raises(ResumeError, match="another header"):
        journal.agree("header", "x", "another header")
    journal.close()


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


def test_what_would_go_on_is_said_and_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed, then typed with other options: the sentence names them, and how to go on."""
    out, text = tmp_path / "out", text_file(tmp_path / "text.txt")
    home = Path(qtool.__file__).parent.parent
    words = ["quantize", model, "--recipe", "w4g128-gptq", "--set", "weights.group_size=32", "-o",
             out, "--calibration", text, "--length", "48", "--samples"]  # fmt: skip
    killed = [sys.executable, "-c", KILLED, *map(str, words), "4"]
    ended = subprocess.run(killed, cwd=home, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    call = caller(monkeypatch, capfd)
    refused = call(*words, "3", "--max-shard-size", "1MB")
    said = refused.err
    assert refused.status == 1 and "the same command goes on" not in said, said
    assert "calibration.samples was 4, is 3, size of a shard was 5000000000, is 1000000" in said
    options = said.split("this command with ")[1].split(" goes on with it")[0]
    assert options == "--samples 4 --max-shard-size 5000000000"
    done = call(*words, *options.split()[1:])
    assert done.status == 0 and "going on with an earlier run" in done.err


RECIPE = {"name": "r", "weights": {"bits": 4}, "calibration": {"source": None, "samples": 4}}
FILE = ["a.safetensors", 7, 1, "0" * 64]


@pytest.mark.parametrize(
    ("fact", "before", "now", "sentence"),
    [
        ("recipe", RECIPE, {**RECIPE, "weights": {"bits": 8}},
         "weights.bits was 4, is 8; this command with --set weights.bits=4 goes on with it"),
        ("recipe", RECIPE, {**RECIPE, "name": "s"},
         "recipe was r, is s; give its command again to finish it (--recipe r)"),
        ("recipe", RECIPE, {**RECIPE, "calibration": {"source": "t", "samples": 4}},
         "calibration.source was not set, is t; give its command again to finish it"),
        ("version of qtool", "0.1", "0.2", "version of qtool was 0.1, is 0.2; with that as it was"),
        ("source", [{"x": 1}, None, FILE], [{"x": 2}, None, FILE],
         "source: config.json.x was 1, is 2; with"),
        ("source", [FILE], [[*FILE[:3], "1" * 64]], "source: a.safetensors has other bytes; with"),
        ("source", [FILE], [[FILE[0], 8, *FILE[2:]]],
         "source: a.safetensors was of 7 bytes, is of 8; with"),
        ("source", [FILE], [["b", 8, *FILE[2:]]],
         "source: b is new, source: a.safetensors is gone; with"),
        ("file of statistics", FILE, ["b", *FILE[1:]],
         "file of statistics was a.safetensors, is b; with"),
        ("version of torch or kind of CPU", {"torch": "2"}, {"torch": "3"},
         "version of torch or kind of CPU: torch was 2, is 3; with"),
        ("version of torch or kind of CPU", ["x" * 99], {"torch": "3"},
         'version of torch or kind of CPU was ["' + "x" * 58 + "..., is"),
        ("calibration text", {"digest": f"sha256:{'0' * 64}"}, {"digest": f"sha256:{'1' * 64}"},
         "calibration text: digest has other content; with"),
    ],
)  # fmt: skip
def test_what_differs(fact: str, before: object, now: object, sentence: str) -> None:
    assert told({fact: (before, now)}).startswith(sentence)


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    """The second one is told who is at work; when that one is gone it may begin."""
    out = tmp_path / "out"
    with workspace(out, is_folder=True, nbytes=0, fresh=False) as space:
        (space.artifact / "a").write_text("a")
        with (
            pytest.raises(
                ResumeError, match=rf"another qtool is making it \(process {os.getpid()}\)"
            ),
            workspace(out, is_folder=True, nbytes=0, fresh=True),
        ):
            pass
        assert (space.artifact / "a").exists()
    assert files(out) == {"a": b"a"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, signal, sys
from qtool.runs.journal import Journal
from qtool.cli.main import main
commit = Journal.commit
def killed(*given, **content):
    commit(*given, **content)
    os.kill(os.getpid(), signal.SIGKILL)
Journal.commit = killed
sys.argv = ["qtool", *sys.argv[1:]]
main()
"""


def test_kill_9(model: Path, tmp_path: Path) -> None:
    """The real thing: the lock is free again, the folder is found, --json tells of nothing else."""
    out = tmp_path / "out"
    words = ["quantize", model, "--recipe", "w4g128-rtn", "--set", "weights.group_size=32",
             "-o", out, "--json"]  # fmt: skip
    home = Path(qtool.__file__).parent.parent
    for code in (["-c", KILLED], ["-c", KILLED], ["-m", "qtool"]):
        ended = subprocess.run(
            [sys.executable, *code, *map(str, words)], cwd=home, capture_output=True, text=True
        )
        assert ended.returncode == (-9 if code[0] == "-c" else 0), ended.stderr
    assert json.loads(ended.stdout)["artifact"] == str(out)
    quantize(model, "w4g128-rtn", tmp_path / "whole", model / "none")
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


def test_what_is_left_beside_a_finished_output_is_swept(tmp_path: Path) -> None:
    """A run that is killed between the last rename and the end leaves its journal and its lock."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("a")
    folder = tmp_path / ".out.partial"
    folder.mkdir()
    (folder / "lock").write_text("qtool 1")
    (folder / "journal").write_text("")
    with pytest.raises(UnsupportedError, match="exists and is not empty"):
        check_free(out, is_folder=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_mark_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept that would not be known as ours; what has its mark does not need it anew."""
    out, pwrite = tmp_path / "out", os.pwrite

    def full(descriptor: int, data: bytes, position: int) -> int:
        if data.startswith(b"qtool "):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, position)

    def step() -> None:
        with workspace(out, is_folder=True, nbytes=0, fresh=False) as space:
            space.journal.commit(str(len(space.journal.done)))
            if len(space.journal.done) < 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UnsupportedError, match="out: the disk is full; free some space"):
            step()
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(KeyboardInterrupt):
        step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwrite", full)
        step()
    step()
    assert out.exists()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """A folder, a file or a link of somebody's that has the name where work would go."""
    out, place = tmp_path / "out", tmp_path / ".out.partial"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years")
    before = files(tmp_path)

    def refused() -> None:
        with (
            pytest.raises(ResumeError, match=r"\.out\.partial beside it, .* was not made by qtool"),
            workspace(out, is_folder=True, nbytes=0, fresh=True),
        ):
            raise AssertionError
        check_free(out, is_folder=True)

    place.symlink_to(precious)
    refused()
    assert place.is_symlink() and files(precious) == {"thesis": b"years"}
    place.unlink()
    place.write_text("a file")
    refused()
    place.unlink()
    precious.rename(place)
    refused()
    assert files(place) == {"thesis": b"years"}
    out.mkdir()  # an empty one may be filled
    refused()
    out.rmdir()
    (place / "lock").write_text("not of qtool")
    refused()
    assert files(place) == {"thesis": b"years", "lock": b"not of qtool"}
    (place / "lock").unlink()
    place.rename(precious)
    place.mkdir()
    (place / "lock").write_text("qtool 1")  # as in an archive that somebody has unpacked
    for name in ("artifact", "artifact/model.safetensors", "hidden-0", "journal"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).symlink_to(precious if name == "artifact" else precious / "thesis")
        refused()
        (place / name).unlink()
    (place / "artifact").rmdir()
    (place / "lock").unlink()
    (place / "lock").symlink_to(precious / "thesis")
    with (
        pytest.raises(UnsupportedError, match="cannot be made"),
        workspace(out, is_folder=True, nbytes=0, fresh=True),
    ):
        raise AssertionError
    (place / "lock").unlink()
    place.rmdir()
    assert files(tmp_path) == before


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_finished_output_that_cannot_get_its_name_is_kept(
    is_folder: bool, tmp_path: Path
) -> None:
    """Somebody has put something in its place meanwhile; when that is gone nothing is lost."""
    out = tmp_path / "out"
    with (
        pytest.raises(UnsupportedError) as refused,
        workspace(out, is_folder=is_folder, nbytes=0, fresh=False) as space,
    ):
        (space.artifact / "a" if is_folder else space.artifact).write_text("hours of work")
        space.journal.commit("all")
        out.mkdir()
        (out / "note").write_text("mine")
    assert any("what is finished is kept" in note for note in refused.value.__notes__)
    (out / "note").unlink()
    out.rmdir()
    with workspace(out, is_folder=is_folder, nbytes=0, fresh=False) as space:
        assert [*space.journal.done] == ["all"]
    assert (out / "a" if is_folder else out).read_text() == "hours of work"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_of_an_earlier_run_is_not_delivered(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    folder = died(model, "w4g128-rtn", out, text, 2, monkeypatch)
    (folder / "artifact/chat_template.jinja").write_text("of another time")
    quantize(model, "w4g128-rtn", out, text)
    quantize(model, "w4g128-rtn", tmp_path / "whole", text)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("where", ["qtool.runs.lock._plain", "qtool.runs.workspace.Watched"])
def test_an_interrupt_before_there_is_anything_leaves_no_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the folder's making and the first thing in it, too."""
    left = []

    def interrupted(*_: object, **__: object) -> bool:
        if not left:
            left.append(sorted(path.name for path in tmp_path.rglob("*")))
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(where, interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        workspace(tmp_path / "x.gguf", is_folder=False, nbytes=1, fresh=False),
    ):
        pass
    assert left == [[".x.gguf.partial", "lock"]]
    assert not any(tmp_path.iterdir())
