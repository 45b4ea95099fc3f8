"""What the system does to a run under way: full disks, sources that change, folders that go.

Each ends in one sentence, leaves nothing under the final name, keeps what is finished, and goes on
to the same bytes when the cause is gone. Here the system's refusals are injected; the bar
tests/benchmarks/full_disk.py has them from real file systems.
"""

import errno
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from qtool import api
from qtool.errors import ResumeError, UnsupportedError
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.quantizing.pipeline import run
from qtool.recipe.recipe import Recipe, load
from qtool.runs.gguf_request import GgufRequest
from qtool.runs.request import Request
from qtool.workspaces import staging
from qtool.workspaces.journal import Journal
from qtool.workspaces.workspace import workspace
from support.runs.faulty_runs import (
    GGUF,
    GPTQ,
    KEPT,
    RTN,
    after,
    content,
    goes_on,
    quantize,
    refused,
    root,
    stop,
)
from support.runs.quantizing import files

__all__ = ["root"]


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
    monkeypatch.setattr("qtool.workspaces.watched.free_bytes", lambda _: free)

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


@pytest.mark.parametrize("recipe", ["q8_0", "w8-rtn"])
def test_files_may_not_be_that_large(recipe: str, tmp_path: Path) -> None:
    """Files get their sizes at once: nothing is begun, and nothing left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(UnsupportedError, match="larger than this file system or `ulimit -f`"):
            api.quantize("tiny", recipe, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_too_little_room_to_begin(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda _: 1000)
    error = refused(root, RTN, tmp_path / "out")
    assert "needs " in str(error) and "its disk has 1,000 left" in str(error)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("recipe", [RTN, "q8_0"])
def test_a_rotated_run_is_gone_on_with_on_the_same_kind_of_cpu(
    recipe: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrices are products of floats, though nothing is calibrated."""
    file = tmp_path / "rotated.yaml"
    plain = "format: gguf\ntype: q8_0\n" if recipe == "q8_0" else (
        "method: rtn\nformat: gptq\nweights:\n  bits: 4\n  group_size: 128\n  symmetric: true\n"
    )  # fmt: skip
    file.write_text(f"{plain}transforms: [rotate]\n")
    loaded, out, progress = load(str(file)), tmp_path / "out", Progress(quiet=True)
    model = root / "tiny"

    def go() -> None:
        if isinstance(loaded, Recipe):
            run(Request("m", model, loaded, out, None, 1, 1 << 30), progress)
        else:
            run_gguf(GgufRequest("m", model, loaded, out, 1), progress)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        after(1, stop, patch)
        go()
    with monkeypatch.context() as patch:
        patch.setattr("qtool.provenance.record.cpu_kind", lambda: "another")
        with pytest.raises(
            ResumeError,
            match=r"kind of CPU: cpu was .*, is another; with that as it was it can be",
        ):
            go()
    go()
    assert out.exists()
