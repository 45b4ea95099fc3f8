"""What the system does to a run under way: full disks, sources that change, folders that go.

Each ends in one sentence, leaves nothing under the final name, keeps what is finished, and goes on
to the same bytes when the cause is gone. Here the system's refusals are injected; the bar
tests/bars/full_disk.py has them from real file systems.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantizing import build, files, text_file

from qtool.errors import QtoolError, ResumeError, SourceError, UnsupportedError
from qtool.gguf import convert
from qtool.gguf.quantize import GgufRequest, run_gguf
from qtool.gguf.recipe import GgufRecipe
from qtool.hub import tiny_folder
from qtool.recipe.recipe import Recipe, load
from qtool.runs import staging
from qtool.runs.journal import Journal
from qtool.runs.pipeline import run
from qtool.runs.progress import Progress
from qtool.runs.request import Request
from qtool.runs.workspace import workspace

RTN, GPTQ, GGUF = "w4g128-rtn", "w4g128-gptq", "q4_k_m"
KEPT = "what is finished is kept"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a text, and the outputs of runs that nothing came between."""
    root = tmp_path_factory.mktemp("root")
    text_file(root / "text.txt")
    build("llama", root / "model")
    shutil.copytree(tiny_folder(), root / "tiny", ignore=shutil.ignore_patterns("*.py", "__*"))
    for recipe in (RTN, GPTQ, GGUF):
        quantize(root, recipe, root / recipe)
    return root


def source_of(root: Path, recipe: str) -> Path:
    return root / ("tiny" if recipe == GGUF else "model")


def quantize(root: Path, recipe: str, out: Path, source: Path | None = None) -> None:
    model = source or source_of(root, recipe)
    sets = [f"calibration.source={root / 'text.txt'}", "calibration.samples=4"]
    sets += ["calibration.length=48"] + ([] if recipe == GGUF else ["weights.group_size=32"])
    loaded = load(recipe, sets)
    progress = Progress(quiet=True)
    if isinstance(loaded, Recipe):
        run(Request("m", model, loaded, out, None, 1, 1 << 30), progress)
    else:
        run_gguf(GgufRequest("m", model, loaded, out, 1), progress)


def load_gguf(name: str) -> GgufRecipe:
    recipe = load(name)
    assert isinstance(recipe, GgufRecipe)
    return recipe


def content(out: Path) -> object:
    return files(out) if out.is_dir() else out.read_bytes()


def after(steps: int, action: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Do something once a run has finished some steps."""
    commit, count = Journal.commit, 0

    def counted(journal: Journal, name: str, **what: object) -> None:
        nonlocal count
        commit(journal, name, **what)
        count += 1
        if count == steps:
            action()

    patch.setattr(Journal, "commit", counted)


def refused(root: Path, recipe: str, out: Path, source: Path | None = None) -> QtoolError:
    """The one sentence that a run ends with."""
    with pytest.raises(QtoolError) as error:
        quantize(root, recipe, out, source)
    assert not out.exists()
    assert "\n" not in str(error.value) and ".partial/" not in str(error.value)
    return error.value


def goes_on(root: Path, recipe: str, out: Path, source: Path | None = None) -> None:
    """The same command takes over what is finished and ends with the same bytes."""
    journal = out.with_name(f".{out.name}.partial") / "journal"
    assert b'"done"' in journal.read_bytes()
    quantize(root, recipe, out, source)
    assert content(out) == content(root / recipe)
    assert not journal.parent.exists()


@pytest.mark.parametrize(
    ("recipe", "what"),
    [(RTN, "model.safetensors"), (RTN, "journal"), (GPTQ, "hidden-0"), (GGUF, "artifact"),
     (GGUF, "journal"), (GPTQ, "README.md")],
)  # fmt: skip
def test_the_disk_is_full(
    recipe: str, what: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file it is that finds no room; half of what was to be written is."""
    out = tmp_path / "out"
    full = False

    def fill() -> None:
        nonlocal full
        full = True

    def named(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    pwrite, append = os.pwrite, Journal._append

    def refusing(descriptor: int, data: Any, position: int) -> int:
        if not full or named(descriptor) != what:
            return pwrite(descriptor, data, position)
        if len(data) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data[: len(data) // 2], position)

    class Full:
        """A journal's file on a disk that is full."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 30

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count: int = self.file.write(data[: self.left])
            self.left = 0
            return count

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    def appended(journal: Journal, entry: Any) -> None:
        if full and what == "journal" and not isinstance(journal._file, Full):
            monkeypatch.setattr(journal, "_file", Full(journal._file))
        append(journal, entry)

    write_text = Path.write_text

    def written(path: Path, *given: Any, **more: Any) -> int:
        if full and path.name == what:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_text(path, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refusing)
        patch.setattr(Path, "write_text", written)
        patch.setattr(Journal, "_append", appended)
        after(2, fill, patch)
        error = refused(root, recipe, out)
    assert isinstance(error, UnsupportedError)
    assert str(error) == f"{out}: the disk is full; free some space or choose another -o"
    assert any(KEPT in note for note in error.__notes__)
    goes_on(root, recipe, out)


@pytest.mark.parametrize("recipe", [GPTQ, GGUF])
def test_room_is_looked_for_while_writing(
    recipe: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the disk is full; and what is finished outlives a try that finds too little."""
    out = tmp_path / "out"
    free = 1 << 40
    monkeypatch.setattr("qtool.runs.watched.free_bytes", lambda _: free)

    def shrink() -> None:
        nonlocal free
        free = 4096

    with monkeypatch.context() as patch:
        after(1, shrink, patch)
        first = refused(root, recipe, out)
    for error in (first, refused(root, recipe, out)):
        assert str(error).startswith(f"{out}: the disk is full: the rest of it needs ")
        assert any(KEPT in note for note in error.__notes__)
    free = 1 << 40
    goes_on(root, recipe, out)


def test_too_little_room_to_begin(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda _: 1000)
    error = refused(root, RTN, tmp_path / "out")
    assert "needs " in str(error) and "its disk has 1,000 left" in str(error)
    assert list(tmp_path.iterdir()) == []


def copied(root: Path, recipe: str, to: Path) -> Path:
    """A copy by the same name, which goes into a GGUF file."""
    source = source_of(root, recipe)
    return shutil.copytree(source, to / source.name)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\0" * 64)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(1, 1))
    other.replace(path)


@pytest.mark.parametrize("recipe", [RTN, GPTQ, GGUF])
@pytest.mark.parametrize("change", [_overwrite, _truncate, _replace])
def test_the_source_changes(
    change: Callable[[Path], None],
    recipe: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of one model and half of another is never delivered."""
    if recipe == GPTQ and change is not _overwrite:
        pytest.skip("as of rounding to nearest")
    model, out = copied(root, recipe, tmp_path / "m"), tmp_path / "out"
    weights = model / "model.safetensors"
    times, before = weights.stat(), weights.read_bytes()
    with monkeypatch.context() as patch:
        after(2, lambda: change(weights), patch)
        error = refused(root, recipe, out, model)
    assert isinstance(error, ResumeError)
    assert str(error).startswith(f"{weights}: was changed while the work was going on; put it back")
    again = refused(root, recipe, out, model) if change is not _truncate else None
    assert again is None or "with another source is kept" in str(again)
    weights.write_bytes(before)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    goes_on(root, recipe, out, model)


def test_the_source_goes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = copied(root, RTN, tmp_path / "m"), tmp_path / "out"
    weights, hidden = model / "model.safetensors", tmp_path / "elsewhere"
    with monkeypatch.context() as patch:
        after(2, lambda: os.rename(weights, hidden), patch)
        error = refused(root, RTN, out, model)
    assert isinstance(error, SourceError)
    assert str(error) == (
        f"{weights}: was there when the work began, and is gone; put it back as it was and give "
        "the same command again"
    )
    assert any(KEPT in note for note in error.__notes__)
    refused(root, RTN, out, model)  # nothing is there to begin with, and nothing is lost
    os.rename(hidden, weights)
    goes_on(root, RTN, out, model)


@pytest.mark.parametrize("recipe", [RTN, GPTQ, GGUF])
def test_the_hidden_folder_goes(
    recipe: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"
    with monkeypatch.context() as patch:
        after(2, lambda: shutil.rmtree(out.parent), patch)
        error = refused(root, recipe, out)
    assert isinstance(error, ResumeError)
    assert str(error) == (
        f"{out}: .out.partial beside it, where the work was going on, was removed; give the same "
        "command again to start over"
    )
    assert not hasattr(error, "__notes__")
    quantize(root, recipe, out)
    assert content(out) == content(root / recipe)


def test_the_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    """Somebody removes the folder of a run and begins anew; the first run then ends."""
    out = tmp_path / "out"
    with (
        pytest.raises(ResumeError, match="was removed"),
        workspace(out, is_folder=True, nbytes=0, fresh=False) as first,
    ):
        shutil.rmtree(first.folder)
        second = workspace(out, is_folder=True, nbytes=0, fresh=False)
        space = second.__enter__()
        (space.artifact / "half").write_text("made")
    assert not out.exists() and (space.artifact / "half").exists()
    second.__exit__(None, None, None)
    assert files(out) == {"half": b"made"}


def test_the_clock_goes_backwards(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour at each look at it, and files that are from the future."""
    now, look, out = 2e9, time.time, tmp_path / "out"

    def backwards() -> float:
        nonlocal now
        now -= 3600
        return now

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "time", backwards)
    monkeypatch.setattr(time, "time_ns", lambda: int(backwards() * 1e9))
    for recipe in (RTN, GPTQ, GGUF):
        with monkeypatch.context() as patch:
            after(3, stop, patch)
            with pytest.raises(KeyboardInterrupt):
                quantize(root, recipe, out)
        for path in (tmp_path / ".out.partial").rglob("*"):
            os.utime(path, (look() + 1e6, look() + 1e6))
        goes_on(root, recipe, out)
        shutil.rmtree(out) if out.is_dir() else out.unlink()


def test_the_output_cannot_be_made_there(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refused(root, RTN, tmp_path / "file" / "out")
    assert str(error).startswith(f"{tmp_path / 'file' / 'out'}: cannot be made: ")


def test_a_read_only_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refusing(path: Path, *given: Any, **more: Any) -> None:
        if path.name == ".out.partial":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *given, **more)

    monkeypatch.setattr(Path, "mkdir", refusing)
    error = refused(root, RTN, tmp_path / "out")
    assert str(error) == (
        f"{tmp_path / 'out'}: cannot be made: Read-only file system; choose another -o"
    )


def test_the_checkpoint_of_a_killed_run_is_swept(root: Path, tmp_path: Path) -> None:
    """One made of a GGUF file, which nobody is at work in; another run's is left alone."""
    source, out = tmp_path / "model.gguf", tmp_path / "out"
    made_of = GgufRequest("m", root / "tiny", load_gguf("f16"), source, 1)
    run_gguf(made_of, Progress(quiet=True))
    for name in ("dead", "alive"):
        (tmp_path / f".out.from-gguf.{name}" / "model").mkdir(parents=True)
    (tmp_path / ".out.from-gguf.dead" / "model" / "model.safetensors").write_bytes(b"1" * 100)
    progress = Progress(quiet=True)
    with (
        convert._held(tmp_path / ".out.from-gguf.alive") as alone,
        convert.checkpoint_folder(source, out, progress, requantize=False) as made,
    ):
        assert alone and (made / "model.safetensors").is_file()
        beside = sorted(path.name for path in tmp_path.iterdir() if "from-gguf" in path.name)
        assert beside == sorted([".out.from-gguf.alive", made.parent.name])
    assert {path.name for path in tmp_path.iterdir()} == {".out.from-gguf.alive", "model.gguf"}
