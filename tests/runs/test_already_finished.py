"""A run that was killed when its output had its name: what the same command finds, and leaves."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.errors import ResumeError, UnsupportedError
from qtool.workspaces import naming, workspace
from qtool.workspaces.already import AlreadyMade
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.naming import path_beside
from qtool.workspaces.replacing import Replace
from support.runs.replacing import FREELY, artifact, mark_of

FOLDER = ".out.partial"
KILLED = 9


class Killed(BaseException):
    pass


def quantized(
    out: Path, mark: str = "new", replace: Replace | None = None, states: str | None = None
) -> None:
    """The run `mark`. states: what it states beside its output."""
    facts = {"recipe": mark}
    stating = None if states is None else lambda _: (path_beside(out), states)
    with workspace.workspace(
        out, is_folder=True, nbytes=1, fresh=False, stating=stating, replace=replace, facts=facts
    ) as space:
        space.agree(facts)
        artifact(space.artifact, mark)
        space.journal.commit("all of it")
        space.conclude({"mark": mark})


def killed_named(out: Path, patch: pytest.MonkeyPatch, states: str | None = None) -> None:
    """It leaves what a kill would leave."""
    left = out.with_name(FOLDER)
    give_name = naming.give_name

    def killed(*given: Path) -> None:
        give_name(*given)
        raise Killed

    with patch.context() as patched, pytest.raises(Killed):
        patched.setattr(naming, "give_name", killed)
        patched.setattr(workspace, "remove", lambda folder: None)
        quantized(out, states=states)
    assert mark_of(out) == "new" and (left / "ended").is_file()


def test_what_the_run_stated_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells how long that run took; who only finds the output there has made nothing."""
    out = tmp_path / "out"
    killed_named(out, monkeypatch, "of the run")
    with pytest.raises(AlreadyMade):
        quantized(out, states="of who found it")
    assert path_beside(out).read_text() == "of the run"
    assert {*os.listdir(tmp_path)} == {"out", path_beside(out).name}


@pytest.mark.parametrize("earlier", [False, True])
def test_what_it_did_not_state_is_stated(
    earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if earlier:  # of another output of that name
        path_beside(out).write_text("of another")
    killed_named(out, monkeypatch)
    with pytest.raises(AlreadyMade):
        quantized(out, states="of who found it")
    assert path_beside(out).read_text() == "of who found it"


def test_a_statement_that_was_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    killed_named(out, monkeypatch, "of the run")
    path_beside(out).unlink()
    with pytest.raises(AlreadyMade):
        quantized(out, states="of who found it")
    assert path_beside(out).read_text() == "of who found it"


@pytest.mark.parametrize("replace", [None, FREELY])
def test_another_run_that_came_first(
    replace: Replace | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking and locking another found it finished, and a third began to replace it: its
    unfinished work is kept, and nothing is called finished."""
    out = tmp_path / "out"
    killed_named(out, monkeypatch)
    acquire = workspace.acquire

    def third() -> None:
        with workspace.workspace(
            out, is_folder=True, nbytes=1, fresh=False, replace=FREELY
        ) as space:
            space.agree({"recipe": "third"})
            space.journal.commit("block 0")
            raise KeyboardInterrupt

    def late(folder: Path, named: Path) -> int:
        monkeypatch.setattr(workspace, "acquire", acquire)
        with pytest.raises(AlreadyMade):
            quantized(out)
        with pytest.raises(KeyboardInterrupt):
            third()
        return acquire(folder, named)

    monkeypatch.setattr(workspace, "acquire", late)
    refused = UnsupportedError if replace is None else ResumeError
    with pytest.raises(refused, match="give --replace" if replace is None else "at it just now"):
        quantized(out, replace=replace)
    assert b"block 0" in (out.with_name(FOLDER) / "journal").read_bytes()
    assert mark_of(out) == "new"


def test_two_that_find_it_finished_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later one takes nothing for finished that it has not seen under the lock."""
    out = tmp_path / "out"
    killed_named(out, monkeypatch)
    acquire = workspace.acquire

    def late(folder: Path, named: Path) -> int:
        monkeypatch.setattr(workspace, "acquire", acquire)
        with pytest.raises(AlreadyMade):
            quantized(out)
        return acquire(folder, named)

    monkeypatch.setattr(workspace, "acquire", late)
    with pytest.raises(UnsupportedError, match="give --replace"):
        quantized(out)
    assert os.listdir(tmp_path) == ["out"]


def test_a_hidden_folder_without_its_lock_goes(tmp_path: Path) -> None:
    """Of a run that was killed between the last two steps of its removal."""
    out = artifact(tmp_path / "out", "new")
    out.with_name(FOLDER).mkdir()
    with pytest.raises(UnsupportedError, match="give --replace"):
        check_free(out, is_folder=True)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("said", [[], "x", {"facts": [], "made": {}}, {"facts": {}, "made": 1}])
def test_what_tells_nothing_is_not_believed(
    said: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    killed_named(out, monkeypatch)
    (out.with_name(FOLDER) / "ended").write_text(json.dumps(said))
    with pytest.raises(UnsupportedError, match="give --replace"):
        quantized(out)
    assert os.listdir(tmp_path) == ["out"]


def dying_while_it_goes(out: Path, steps: int) -> None:
    """This process ends before the next step, of so many, that takes away what is beside `out`."""

    def counted(plain: Callable[..., None]) -> Callable[..., None]:
        def step(*given: Any, **more: Any) -> None:
            nonlocal steps
            if out.exists() and Path(given[0]) != out:
                if not steps:
                    os._exit(KILLED)
                steps -= 1
            plain(*given, **more)

        return step

    for name in ("unlink", "rmdir"):
        setattr(Path, name, counted(getattr(Path, name)))
    os.rename = counted(os.rename)


@pytest.mark.parametrize("gone", range(5))
def test_whatever_of_the_hidden_folder_is_gone(gone: int, tmp_path: Path) -> None:
    """Killed before each step that takes away the last of it, it is told finished."""
    out = tmp_path / "out"
    child = os.fork()
    if child == 0:
        try:
            dying_while_it_goes(out, gone)
            quantized(out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    assert mark_of(out) == "new" and len(os.listdir(tmp_path)) > 1
    with pytest.raises(AlreadyMade) as found:
        quantized(out)
    assert found.value.made == {"mark": "new"} and os.listdir(tmp_path) == ["out"]
    with pytest.raises(UnsupportedError, match="give --replace"):
        quantized(out)


@pytest.mark.parametrize("replace", [None, FREELY])
def test_the_last_of_it_is_of_another_run(replace: Replace | None, tmp_path: Path) -> None:
    """Where an artifact lies now that it does not tell of, it goes, and nothing is called done."""
    out = artifact(tmp_path / "out", "another")
    last = tmp_path / ".out.ended"
    made = {"facts": {"recipe": "new"}, "made": {"mark": "new"}, "seen": [], "stated": False}
    last.write_text(json.dumps(made))
    if replace is None:
        with pytest.raises(UnsupportedError, match="give --replace"):
            quantized(out)
    else:
        quantized(out, replace=replace)
        assert mark_of(out) == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("text", ["mine", "{}", '{"seen": []}'])
def test_a_file_of_that_name_that_is_not_ours_stays(text: str, tmp_path: Path) -> None:
    out, theirs = tmp_path / "out", tmp_path / ".out.ended"
    theirs.write_text(text)
    quantized(out)
    with pytest.raises(UnsupportedError, match="give --replace"):
        quantized(out)
    assert theirs.read_text() == text and mark_of(out) == "new"
