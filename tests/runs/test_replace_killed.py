"""--replace, where the run is killed: nothing that was finished is lost."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qtool.errors import ResumeError, UnsupportedError
from qtool.workspaces import replacing, staging
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.naming import path_beside
from qtool.workspaces.replacing import Replace
from qtool.workspaces.workspace import workspace
from support.runs.replacing import (
    FREELY,
    artifact,
    by_staging,
    by_workspace,
    can_trade,
    mark_of,
    no_trade,
)

KILLED = 9


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(staging, "sync", lambda descriptor: None)


def killed_at(point: int, work: Callable[[], None]) -> bool:
    """Do the work in a process that ends, without any handler, before the `point`th change of a
    name or removal, which is also after the one before; False where there are not so many."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(change: Callable[..., object]) -> Callable[..., object]:
            def changed(*names: object, **more: object) -> object:
                nonlocal count
                if count == point:
                    os._exit(KILLED)
                count += 1
                return change(*names, **more)

            return changed

        try:
            for name in ("rename", "unlink", "rmdir"):
                setattr(os, name, counted(getattr(os, name)))
            replacing._exchange = counted(replacing._exchange)  # type: ignore[assignment]
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("make", "trades"),
    [
        (by_staging, False),
        (by_workspace, True),
        pytest.param(by_staging, True, marks=pytest.mark.slow),
        pytest.param(by_workspace, False, marks=pytest.mark.slow),
    ],
)
def test_whenever_it_is_killed_one_whole_artifact_is_there(
    make: Callable[[Path], None], trades: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not trades:
        no_trade(monkeypatch)
    elif not can_trade(tmp_path):
        pytest.skip("this file system does not trade names")
    seen = []
    for point in range(100):
        out = artifact(tmp_path / str(point) / "out", "old")
        if not killed_at(point, lambda out=out: make(out)):  # type: ignore[misc]
            break
        if trades:
            assert out.exists()
        with pytest.raises(UnsupportedError, match="give --replace"):
            check_free(out, is_folder=True)  # as every command with this output does
        seen.append(mark_of(out))
        make(out)
        assert mark_of(out) == "new"
        if make is by_workspace:
            assert os.listdir(out.parent) == ["out"]
    assert mark_of(out) == "new" and os.listdir(out.parent) == ["out"]
    assert seen == sorted(seen, reverse=True) and {*seen} == {"old", "new"}


def check_statement(out: Path) -> None:
    """What is there is never blamed: its statement is its own, or there is none."""
    beside = path_beside(out)
    if out.exists() and beside.exists():
        assert beside.read_text() == mark_of(out)


def going_on(out: Path, replace: Replace | None = FREELY, mark: str = "new") -> bool:
    """The run `mark`; whether all of it was finished by an earlier try."""

    def stating(folder: Path) -> tuple[Path, str]:
        return path_beside(out), mark_of(folder)

    with workspace(
        out, is_folder=True, nbytes=1, fresh=False, stating=stating, replace=replace
    ) as space:
        space.agree({"recipe": mark})
        found = "all of it" in space.journal.done and any(space.artifact.iterdir())
        if found:
            assert mark_of(space.artifact) == mark
        artifact(space.artifact, mark)
        space.journal.commit("all of it")
        (out.parent / "finished").touch()
    return found


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("trades", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("free", [pytest.param(True, marks=pytest.mark.slow), False])
def test_whenever_it_is_killed_what_is_finished_is_kept(
    free: bool, trades: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has the name. A command that is refused removes nothing; free: the old one is then
    removed by hand."""
    if not trades:
        no_trade(monkeypatch)
    elif not can_trade(tmp_path):
        pytest.skip("this file system does not trade names")
    tries = {True: 0, False: 0}
    for point in range(100):
        out = artifact(tmp_path / str(point) / "out", "old")
        path_beside(out).write_text("old")
        if not killed_at(point, lambda out=out: going_on(out)):  # type: ignore[misc]
            break
        check_statement(out)
        finished = (out.parent / "finished").exists()
        with pytest.raises(UnsupportedError, match="give --replace"):
            going_on(out, None)
        check_statement(out)
        named = mark_of(out) == "new"
        assert path_beside(out).exists() or not named
        if finished and not named:
            with pytest.raises(ResumeError, match="unfinished run"):
                going_on(out, mark="other")
        if free:
            shutil.rmtree(out)
        found = going_on(out, None if free else FREELY)
        assert found == (finished and not named)
        there = {"out", "out.provenance.json", "finished"}
        for mark in ("new", "other"):
            if mark == "other":
                assert not going_on(out, mark=mark)
            assert (mark_of(out), path_beside(out).read_text()) == (mark, mark)
            assert {*os.listdir(out.parent)} == there
        tries[found] += 1
    assert all(tries.values())
