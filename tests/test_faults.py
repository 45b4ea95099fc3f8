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
from qtool.gguf.open import open_source
from qtool.gguf.quantize import GgufRequest, run_gguf
from qtool.gguf.recipe import GgufRecipe
from qtool.hub import tiny_folder
from qtool.recipe.recipe import Recipe, load
from qtool.runs import identity, staging
from qtool.runs.journal import Journal
from qtool.runs.pipeline import run
from qtool.runs.progress import Progress
from qtool.runs.quantize import Asked
from qtool.runs.quantize import quantize as made_of
from qtool.runs.request import Request
from qtool.runs.workspace import made_beside as workspace_of_source
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
    assert again is None or "began it: source: model" in str(again)
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


def other_weights(path: Path) -> None:
    """Another fine-tune, in a store that gives every file the same time."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content), 2):
        content[place] ^= 1  # the low byte of 16 bits
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("recipe", [RTN, GGUF])
@pytest.mark.parametrize("made", [False, True])
def test_a_source_of_the_same_name_size_and_time(
    made: bool, recipe: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a checkpoint that says what it was itself made of."""
    model, out = copied(root, recipe, tmp_path / "m"), tmp_path / "out"
    if made:
        (model / "qtool.json").write_text('{"made_from": {"format": "gguf"}}')
    with monkeypatch.context() as patch:
        after(2, stop, patch)
        with pytest.raises(KeyboardInterrupt):
            quantize(root, recipe, out, model)
    other_weights(model / "model.safetensors")
    error = refused(root, recipe, out, model)
    assert isinstance(error, ResumeError) and "began it: source: model" in str(error)
    other_weights(model / "model.safetensors")
    quantize(root, recipe, out, model)
    assert out.exists() and not (tmp_path / ".out.partial").exists()


def test_a_link_leads_elsewhere_meanwhile(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models are of the same size and time; that of one moment is worked on."""
    one, two = copied(root, RTN, tmp_path / "1"), copied(root, RTN, tmp_path / "2")
    other_weights(two / "model.safetensors")
    link, out = tmp_path / "current", tmp_path / "out"
    link.symlink_to(one)

    def lead_elsewhere() -> None:
        link.unlink()
        link.symlink_to(two)

    with monkeypatch.context() as patch:
        after(2, lead_elsewhere, patch)
        error = refused(root, RTN, out, link)
    assert "was changed while the work was going on" in str(error)


def test_a_link_leads_to_a_copy(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is the same under another number, as of a disk reached over a network, is the same."""
    model, out = copied(root, RTN, tmp_path / "m"), tmp_path / "out"
    weights = model / "model.safetensors"

    def copy() -> None:
        shutil.copy2(weights, weights.with_name("other"))
        os.replace(weights.with_name("other"), weights)

    with monkeypatch.context() as patch:
        after(2, copy, patch)
        quantize(root, RTN, out, model)
    assert content(out) == content(root / RTN)


def test_some_of_a_file_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning, the end, and pieces of what is between; never all of a large one."""
    path = tmp_path / "file"
    monkeypatch.setattr(identity, "_HEAD", 100)
    monkeypatch.setattr(identity, "_PIECE", 10)
    monkeypatch.setattr(identity, "_PLACES", 4)
    for size in (0, 5, 100, 105, 120, 131, 1000):
        path.write_bytes(bytes(size))
        before, seen = identity.looked_at(path), []
        for place in range(size):
            path.write_bytes(bytes(place) + b"1" + bytes(size - place - 1))
            seen += [place] if identity.looked_at(path) != before else []
        assert len(seen) == min(size, 140)
        assert not seen or (seen[0] == 0 and seen[-1] == size - 1)


def from_gguf(source: Path, out: Path, *, fresh: bool = False) -> None:
    asked = Asked(str(source), out, None, None, None, False, fresh, 1, None, [])
    loaded = load(RTN)
    assert isinstance(loaded, Recipe)
    made_of(loaded, asked, Progress(quiet=True))


def test_a_gguf_file_changes_between_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is made of it, and kept with the rest for as long as that can go on."""
    source, out = tmp_path / "model.gguf", tmp_path / "out"
    run_gguf(GgufRequest("m", root / "tiny", load_gguf("f16"), source, 1), Progress(quiet=True))
    os.utime(source, ns=(10**18, 10**18))
    from_gguf(source, tmp_path / "whole")
    kept = tmp_path / ".out.from-gguf"

    def killed(steps: int) -> None:
        with monkeypatch.context() as patch:
            after(steps, stop, patch)
            with pytest.raises(KeyboardInterrupt):
                from_gguf(source, out)
        assert not out.exists()

    killed(2)
    assert (kept / "model" / "model.safetensors").is_file()
    other_weights(source)
    with pytest.raises(ResumeError, match=r"source: model\.safetensors was of "):
        from_gguf(source, out)
    other_weights(source)
    shutil.rmtree(kept)  # it may be made again
    killed(1)
    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert_to_hf", None)  # and is not, where it is there
        from_gguf(source, out)
    assert content(out) == content(tmp_path / "whole")
    shutil.rmtree(out)
    killed(2)
    other_weights(source)
    from_gguf(source, out, fresh=True)
    assert content(out) != content(tmp_path / "whole")
    beside = {path.name for path in tmp_path.iterdir()}
    assert beside == {"whole", "out", "model.gguf"}


def test_a_gguf_file_changes_while_it_is_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model.gguf"
    run_gguf(GgufRequest("m", root / "tiny", load_gguf("f16"), source, 1), Progress(quiet=True))
    write = convert._write

    def writing(*given: Any) -> int:
        size = write(*given)
        os.utime(source, ns=(1, 1))
        return size

    monkeypatch.setattr(convert, "_write", writing)
    with pytest.raises(ResumeError, match=r"model\.gguf: was changed or removed while it was read"):
        from_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_too_little_room_for_the_checkpoint_of_a_gguf_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before it is made."""
    source = tmp_path / "model.gguf"
    run_gguf(GgufRequest("m", root / "tiny", load_gguf("f16"), source, 1), Progress(quiet=True))
    monkeypatch.setattr(staging, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(convert, "convert_to_hf", None)
    with pytest.raises(UnsupportedError, match="its disk has 1,000 left"):
        from_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_the_checkpoint_of_a_killed_run_is_swept(root: Path, tmp_path: Path) -> None:
    """When the output is there, made of whatever; one at work, or another's, is left alone."""
    kept = tmp_path / ".out.from-gguf"
    (kept / "model").mkdir(parents=True)
    (kept / "thesis").write_text("years")
    quantize(root, RTN, tmp_path / "out")
    assert files(kept) == {"thesis": b"years"}
    (kept / "lock").write_text("qtool 1")
    (tmp_path / "out").rename(tmp_path / "first")
    with workspace_of_source(tmp_path / "out") as folder:
        assert folder == kept
        quantize(root, RTN, tmp_path / "out")
        assert (kept / "thesis").exists()
        with (
            pytest.raises(ResumeError, match="another qtool is making it"),
            workspace_of_source(tmp_path / "out"),
        ):
            raise AssertionError
    assert {path.name for path in tmp_path.iterdir()} == {"first", "out"}


@pytest.mark.parametrize("recipe", [GPTQ, GGUF, "convert"])
def test_all_is_on_the_disk_before_it_has_its_name(
    recipe: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut too: every file and folder, and then the folder above."""
    out, log = tmp_path / "new" / "out", []
    fsync, fdatasync, rename = os.fsync, staging.sync, os.rename

    def synced(descriptor: int) -> None:
        log.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        (fsync if os.path.isdir(log[-1]) else fdatasync)(descriptor)

    def renamed(one: Path, other: Path) -> None:
        before = {str(path) for path in one.rglob("*")} | {str(one)}
        assert before <= set(log), before - set(log)
        log.clear()
        rename(one, other)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(staging, "sync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    if recipe == "convert":
        source = tmp_path / "model.gguf"
        monkeypatch.setattr(os, "rename", rename)
        run_gguf(GgufRequest("m", root / "tiny", load_gguf("f16"), source, 1), Progress(quiet=True))
        monkeypatch.setattr(os, "rename", renamed)
        convert.convert_to_hf(open_source(source), out, None, 1 << 62, Progress(quiet=True))
    else:
        quantize(root, recipe, out)
    assert out.exists() and log[0] == str(out.parent)


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
        patch.setattr("qtool.runs.provenance.cpu_kind", lambda: "another")
        with pytest.raises(
            ResumeError,
            match=r"kind of CPU: cpu was .*, is another; with that as it was it can be",
        ):
            go()
    go()
    assert out.exists()
