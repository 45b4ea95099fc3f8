"""Sources that change, go or are others while a run is under way, or between two of them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.converting import gguf_to_hf as convert
from qtool.converting.resume import at_once
from qtool.errors import ResumeError, SourceError, UnsupportedError
from qtool.gguf.open import open_source
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.quantizing.quantize import Asked
from qtool.quantizing.quantize import quantize as made_of
from qtool.recipe.recipe import Recipe, load
from qtool.runs.gguf_request import GgufRequest
from qtool.workspaces import identity, staging
from qtool.workspaces.leftovers import made_beside as workspace_of_source
from support.runs.faulty_runs import (
    GGUF,
    GPTQ,
    KEPT,
    RTN,
    after,
    content,
    goes_on,
    load_gguf,
    quantize,
    refused,
    root,
    source_of,
    stop,
)
from support.runs.quantizing import files

__all__ = ["root"]


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


def other_weights(path: Path) -> None:
    """Another fine-tune, in a store that gives every file the same time."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content), 2):
        content[place] ^= 1  # the low byte of 16 bits
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


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
        if one.name == "ended":  # after the output has its name
            assert out.exists()
            return rename(one, other)
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
        convert.convert_to_hf(
            open_source(source), out, None, 1 << 62, Progress(quiet=True), lambda _: at_once(out)
        )
    else:
        quantize(root, recipe, out)
    assert out.exists() and log[0] == str(out.parent)
