"""--replace: a new artifact in the place of an earlier one, which is whole until then."""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from qtool.errors import QtoolError, UnsupportedError
from qtool.workspaces import replacing
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.replacing import Replace
from qtool.workspaces.staging import check_out, staged_file
from qtool.workspaces.workspace import workspace
from support.runs.quantizing import Call, first_blocks_of_tiny
from support.runs.replacing import FREELY, artifact, by_staging, by_workspace, mark_of, no_trade

Making = Callable[[Path], AbstractContextManager[object]]


@pytest.mark.parametrize("trades", [True, False])
@pytest.mark.parametrize("make", [by_staging, by_workspace])
def test_what_fails_leaves_the_old_one(
    make: Callable[[Path], None], trades: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = artifact(tmp_path / "out", "old")
    rename = os.rename

    def refusing(one: Path, other: Path) -> None:
        if other == out:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(one, other)

    def busy(one: Path, other: Path) -> bool:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        if trades:
            patch.setattr(replacing, "_exchange", busy)
        else:
            no_trade(patch)
            put = iter([refusing, rename])  # back it may go
            patch.setattr(
                os, "rename", lambda a, b: (next(put) if Path(b) == out else rename)(a, b)
            )
        with pytest.raises(UnsupportedError, match="cannot be given this name: Device or resource"):
            make(out)
    assert mark_of(out) == "old"
    make(out)
    assert mark_of(out) == "new" and os.listdir(tmp_path) == ["out"]


def test_an_unfinished_run_goes_on_beside_the_old_one(tmp_path: Path) -> None:
    """What it has finished is not taken for the leftovers of the run that made the old one."""
    out = artifact(tmp_path / "out", "old")
    with (
        pytest.raises(KeyboardInterrupt),
        workspace(out, is_folder=True, nbytes=1, fresh=False, replace=FREELY) as space,
    ):
        space.artifact.rmdir()  # as of a run that only measured so far
        space.journal.commit("measured")
        raise KeyboardInterrupt
    with pytest.raises(UnsupportedError, match="give --replace"):
        check_free(out, is_folder=True)
    assert mark_of(out) == "old"
    with workspace(out, is_folder=True, nbytes=1, fresh=False, replace=FREELY) as space:
        assert "measured" in space.journal.done
        artifact(space.artifact, "new")
    assert mark_of(out) == "new" and os.listdir(tmp_path) == ["out"]


def test_a_file(tmp_path: Path) -> None:
    out = tmp_path / "model.GGUF"
    out.write_text("GGUF, old")
    with pytest.raises(UnsupportedError, match="exists"), staged_file(out, 3):
        pass
    with pytest.raises(KeyboardInterrupt), staged_file(out, 3, FREELY):
        raise KeyboardInterrupt
    assert out.read_text() == "GGUF, old"
    with staged_file(out, 3, FREELY) as (_, descriptor):
        os.write(descriptor, b"new")
    assert out.read_text() == "new" and os.listdir(tmp_path) == [out.name]


def refusal(out: Path, *inputs: Path) -> str:
    with pytest.raises(QtoolError) as error:
        check_free(out, is_folder=out.is_dir(), replace=Replace(inputs))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("notes.txt", "holds notes.txt, which no artifact does"),
        (".git/HEAD", "holds .git, .git/HEAD, which"),
        ("additional_chat_templates/x.txt", "holds additional_chat_templates/x.txt"),
        ("tokenizer/config.json", "holds tokenizer, tokenizer/config.json"),
        ("other.safetensors", "holds other.safetensors"),
        ("modeling.py", "holds modeling.py"),
    ],
)
def test_a_folder_with_anything_else_in_it(name: str, says: str, tmp_path: Path) -> None:
    out = artifact(tmp_path / "out", "old", (name,))
    assert says in refusal(out)
    with pytest.raises(UnsupportedError, match="no artifact does"):
        by_staging(out)
    assert (out / name).read_text() == "old"


def test_what_is_no_artifact(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    check_out(out)  # an empty folder is free as ever
    (out / "README.md").write_text("mine")
    (out / "config.json").write_text('{"auto_map": {}}')
    for name in ("model-00001-of-00002.safetensors", "modeling.py"):
        (out / name).touch()
    assert "has no qtool.json" in refusal(out)  # somebody's model
    (out / "qtool.json").write_text("{}")
    check_out(out, FREELY)
    (out / "vocab.txt").symlink_to("README.md")
    assert "holds vocab.txt" in refusal(out)
    link = tmp_path / "link"
    link.symlink_to(out)
    assert "is a link" in refusal(link)
    file = tmp_path / "weights.bin"
    file.touch()
    assert "whose names end in .gguf" in refusal(file)
    thesis = tmp_path / "thesis.gguf"
    for begin in ("", "GGU", "Chapter 1"):
        thesis.write_text(begin)
        assert "is no GGUF file" in refusal(thesis)


def test_what_is_read_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = artifact(tmp_path / "out", "old")
    file, same = tmp_path / "a.gguf", tmp_path / "b.gguf"
    file.touch()
    os.link(file, same)
    link = tmp_path / "link"
    link.symlink_to(out / "model.safetensors")
    for place, given in ((out, out), (out, out / "config.json"), (out, link), (file, same)):
        assert "is what this command reads" in refusal(place, given)
    for here in (out, out / "additional_chat_templates"):
        monkeypatch.chdir(here)
        assert "is the working folder, or holds it" in refusal(out)


def test_the_commands(tmp_path: Path, call: Call) -> None:
    model = first_blocks_of_tiny(tmp_path / "model", 1)
    folder, file = tmp_path / "folder", tmp_path / "file.gguf"
    quantize = ("quantize", model, "--recipe")
    for rtn, gguf in (("w8a16-ct", "q8_0"), ("w4g128-rtn", "q4_0")):
        for recipe, out, more in ((rtn, folder, ()), (gguf, file, ("--modelfile",))):
            said = call(*quantize, recipe, "-o", out, "--replace", *more)
            assert said.status == 0, said.err
    assert call("verify", folder, "--against", model).status == 0
    fresh = tmp_path / "fresh.gguf"
    assert call(*quantize, "q4_0", "-o", fresh).status == 0
    assert file.read_bytes() == fresh.read_bytes()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for command in (
        (*quantize, "w4g128-rtn", "-o", folder),
        (*quantize, "w4g128-rtn", "-o", model, "--replace"),
        (*quantize, "w4g128-rtn", "-o", tmp_path, "--replace"),
        ("quantize", file, "--recipe", "q2_k", "--requantize", "-o", file, "--replace"),
        ("convert", file, "--to", "gguf-q8_0", "-o", file, "--replace"),
        ("convert", folder, "--to", "gptq-v2", "-o", folder, "--replace"),
    ):
        said = call(*command)
        assert said.status == 1 and said.err.splitlines()[-1].startswith("error: "), said.err
    for command in (  # --fresh is about what is unfinished: what is there is not taken away
        (*quantize, "w4g128-rtn", "-o", folder), (*quantize, "q4_0", "-o", file),
        ("convert", model, "--to", "hf", "-o", folder),
        ("convert", folder, "--to", "gguf-q8_0", "--lossy", "-o", file),
    ):  # fmt: skip
        said = call(*command, "--fresh")
        assert said.status == 1 and said.err.endswith(", or give --replace\n"), said.err
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for source, to, name in (
        (folder, "hf", "other"), (folder, "gptq-v2", "other"), (fresh, "hf", "other"),
        (folder, "gguf-q8_0", "other.gguf"), (folder, "gguf-q8_0", "other.gguf"),
    ):  # fmt: skip
        made = ("--to", to, "-o", tmp_path / name, "--replace")
        said = call("convert", source, "--lossy", *made)
        assert said.status == 0, said.err
    assert call("verify", tmp_path / "other", "--against", fresh).status == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
