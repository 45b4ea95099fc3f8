"""Outputs that cannot be: names that are taken, full disks, signals; and what is kept."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qtool
from qtool.formats import safetensors_writer
from support.runs import quantizing
from support.runs.bad_models import (
    RECIPES,
    Q,
    arguments,
    assert_goes_on,
    assert_one_sentence,
    model,
    original,
    replace,
    snapshot,
)
from support.runs.quantizing import Call, Called

__all__ = ["model", "original"]


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-gptq"])
def test_taken_names(recipe: str, model: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert call(*arguments(model, recipe, out)).status == 0  # an empty folder is no harm
    files = quantizing.files(tmp_path)
    said = call(*arguments(model, recipe, out))
    assert_one_sentence(said, str(out), "exists and is not empty")
    file = tmp_path / "file"
    file.write_text("mine")
    said = call(*arguments(model, recipe, file))
    assert_one_sentence(said, str(file), "a file is in the way")
    (tmp_path / "link").symlink_to("nowhere")
    said = call(*arguments(model, recipe, tmp_path / "link"))
    assert_one_sentence(said, "a link that leads nowhere is in the way")
    (tmp_path / "link").unlink()
    said = call(*arguments(model, recipe, tmp_path / "model.safetensors"))
    assert_one_sentence(said, "makes a folder, with config.json", "name it without .safetensors")
    said = call(*arguments(model, recipe, file / "below"))
    assert_one_sentence(said, str(file / "below"), "cannot be made")
    assert quantizing.files(tmp_path) == files | {"file": b"mine"}


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "q8_0"])
def test_a_folder_called_like_an_alias_is_not_the_model(
    recipe: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for what the command reads."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/notes").write_text("of weeks")
    said = call("quantize", "tiny", "--recipe", recipe, "-o", "tiny")
    assert_one_sentence(said, "not empty" if recipe == "w4g128-rtn" else "tiny: is a folder")
    said = call("quantize", "tiny", "--recipe", recipe, "-o", ".")
    assert_one_sentence(said, "-o names nothing but the folder that this runs in")


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "q8_0"])
def test_nobody_is_told_to_remove_what_is_not_an_artifact(
    recipe: str, model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all the model itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("of weeks")
    files = quantizing.files(tmp_path)
    folder = recipe == "w4g128-rtn"
    for out, says in (
        (model, "is what this command reads"),
        (model.parent, "is what this command reads"),
        (Path("mine"), "is not empty; choose another" if folder else "name the file to make"),
        (Path(""), "(model), or holds it" if folder else "."),  # as of a variable that is not set
    ):
        said = call("quantize", "model", "--recipe", recipe, "-o", out)
        assert_one_sentence(said, says)
        assert "remove it" not in said.err, said.err
    said = call("quantize", "", "--recipe", recipe, "-o", "new")
    assert said.status == 2 and said.err.startswith("error: the model has no name; give a folder")
    assert quantizing.files(tmp_path) == files


def test_what_is_no_model_but_lies_near_one(model: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "notes.txt").write_text("hi")
    for name, says in (
        ("notes.txt", "not weights; name a model's folder, or a .safetensors or .gguf file"),
        ("", f"did you mean {model}?"),
    ):
        said = call("quantize", tmp_path / name, "--recipe", "w4g128-rtn", "-o", tmp_path / "new")
        assert_one_sentence(said, says)


def test_a_link_to_an_empty_folder(model: Path, tmp_path: Path, call: Call) -> None:
    """The artifact goes where the link leads, and the link stays."""
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    said = call(*arguments(model, "w4g128-rtn", link))
    assert said.status == 0, said.err
    assert link.is_symlink() and (real / "qtool.json").is_file()
    assert snapshot(tmp_path / "disk") >= {"real", "real/model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "link", "model"}


def test_a_mount_point_is_refused_before_the_work(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mounted"
    out.mkdir()
    monkeypatch.setattr(
        "qtool.workspaces.staging.os.path.ismount", lambda path: str(path) == str(out)
    )
    monkeypatch.setattr(
        "qtool.quantizing.pipeline.Checkpoint.open", lambda _: pytest.fail("work was done")
    )
    said = call(*arguments(model, "w4g128-rtn", out))
    assert_one_sentence(said, f"{out}: is a mount point", "inside it")


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "q4_k_m"])
@pytest.mark.parametrize("out", ["", "."])
def test_outputs_without_a_name(
    out: str, recipe: str, model: Path, tmp_path: Path, call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As of a variable of the shell that is not set."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    words = ("quantize", str(model), "--recipe", recipe, "-o", out)
    assert_one_sentence(call(*words), "-o names nothing but the folder that this runs in")


def test_a_gguf_file_by_the_other_ending(model: Path, tmp_path: Path, call: Call) -> None:
    words = ("quantize", str(model), "--recipe", "q4_0", "-o", str(tmp_path / "x.safetensors"))
    assert_one_sentence(call(*words), "recipe q4_0 makes a GGUF file; choose a name")
    assert not (tmp_path / "x.safetensors").exists()


def test_a_name_that_cannot_be_given(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names what was asked for, not the hidden folder."""

    def refuse(one: Path, *_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(one))

    monkeypatch.setattr("qtool.workspaces.staging.os.rename", refuse)
    before = snapshot(tmp_path)
    asked = arguments(model, "w4g128-rtn", tmp_path / "out")
    said = call(*asked)
    assert_one_sentence(said, f"{tmp_path / 'out'}: the finished folder cannot be given this name")
    monkeypatch.undo()
    assert_goes_on(said, tmp_path, before, call, asked)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_parent(model: Path, tmp_path: Path, call: Call) -> None:
    parent = tmp_path / "closed"
    parent.mkdir(mode=0o500)
    said = call(*arguments(model, "w4g128-rtn", parent / "out"))
    assert_one_sentence(said, str(parent / "out"), "cannot be made")


def test_a_place_where_nothing_can_be_made(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr("qtool.workspaces.workspace.Path.mkdir", refuse)
    before = snapshot(tmp_path)
    said = call(*arguments(model, "w4g128-rtn", tmp_path / "new" / "out"))
    assert_one_sentence(said, str(tmp_path / "new" / "out"), "cannot be made: Permission denied")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("after", "recipe"),
    [
        pytest.param(after, recipe, marks=[] if recipe in few else [pytest.mark.slow])
        for after, few in ((0, RECIPES[::2]), (20_000, RECIPES[:2]), (80_000, RECIPES[:1]))
        for recipe in RECIPES
    ],
)
def test_full_disk(
    recipe: str, after: int, model: Path, tmp_path: Path, call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    left = after
    pwrite = os.pwrite

    def fill(descriptor: int, data: Any, position: int) -> int:
        nonlocal left
        if left < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= len(data)
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(safetensors_writer.os, "pwrite", fill)
    before = snapshot(tmp_path)
    asked = arguments(model, recipe, tmp_path / "out")
    said = call(*asked)
    assert_one_sentence(said, str(tmp_path), "the disk is full")
    monkeypatch.undo()
    assert_goes_on(said, tmp_path, before, call, asked)


def test_disk_that_is_full_at_the_end(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors fit, the tokenizer does not."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    before = snapshot(tmp_path)
    asked = arguments(model, "w4g128-rtn", tmp_path / "out")
    said = call(*asked)
    assert_one_sentence(said, f"{tmp_path / 'out'}: the disk is full")
    monkeypatch.undo()
    assert_goes_on(said, tmp_path, before, call, asked)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
sys.argv = ["qtool", *sys.argv[1:]]
from qtool.cli.main import main
main()
"""


def test_files_that_may_not_grow(model: Path, tmp_path: Path) -> None:
    """A limit of the operating system, in a process of its own: no stand-in is involved."""
    before = snapshot(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments(model, "w4g128-rtn", tmp_path / "out")],
        cwd=Path.home(),  # the qtool that is installed, not the one that lies here
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = Called(result.returncode, result.stdout, result.stderr)
    assert_one_sentence(said, "a file would be larger than this file system or `ulimit -f` allows")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_interrupted(
    number: signal.Signals, model: Path, tmp_path: Path, call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Ctrl-C, and what job schedulers and closed terminals send: kept, and the status tells."""

    def stop(*_: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(quantizing.Sink, "close", stop)
    before = snapshot(tmp_path)
    asked = arguments(model, "w4g128-rtn", tmp_path / "out")
    handler = signal.signal(number, signal.SIG_DFL)  # one that nohup ignores stays ignored else
    try:
        said = call(*asked)
    finally:
        signal.signal(number, handler)
    assert said.status == 128 + number and "Traceback" not in said.err
    monkeypatch.undo()
    assert_goes_on(said, tmp_path, before, call, asked)


STOPPED = """
import os, signal, sys
from qtool.runs.sink import Sink
from qtool.cli.main import main
number = signal.Signals[sys.argv[1]]
signal.signal(number, signal.SIG_DFL)  # a signal that nohup ignores stays ignored otherwise
Sink.close = lambda *_: os.kill(os.getpid(), number)
sys.argv = ["qtool", *sys.argv[2:]]
main()
"""


def test_ended_by_a_signal(model: Path, tmp_path: Path, call: Call) -> None:
    """A whole process, as job schedulers end it: what waits for it sees the status."""
    before = snapshot(tmp_path)
    asked = arguments(model, "w4g128-rtn", tmp_path / "out")
    result = subprocess.run(
        [sys.executable, "-c", STOPPED, "SIGTERM", *asked],
        # The package under test, not whatever the working folder holds.
        cwd=model,
        env={**os.environ, "PYTHONPATH": str(Path(qtool.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 128 + signal.SIGTERM and "Traceback" not in result.stderr
    said = Called(result.returncode, result.stdout, result.stderr)
    assert_goes_on(said, tmp_path, before, call, asked)


def test_a_failed_run_closes_its_files(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(model, Q, (5, 7), float("nan"), np.float32)
    sinks: list[quantizing.Sink] = []
    made = quantizing.Sink.__init__

    def remember(sink: quantizing.Sink, *given: Any) -> None:
        made(sink, *given)
        sinks.append(sink)

    monkeypatch.setattr(quantizing.Sink, "__init__", remember)
    assert call(*arguments(model, "w4g128-rtn", tmp_path / "out")).status == 1
    (sink,) = sinks
    assert not sink.writer._files


def test_bugs_leave_no_artifact(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not explained away, and still no half artifact has the name of a whole one."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(quantizing.Sink, "close", fail)
    before = snapshot(tmp_path)
    with pytest.raises(ZeroDivisionError):
        quantizing.quantize(model, "w4g128-rtn", tmp_path / "out", "weights.group_size=32")
    assert all(path.startswith(".out.partial") for path in snapshot(tmp_path) - before)
