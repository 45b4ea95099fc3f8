"""Runs that die behind a line of their journal, and files of which a bit is turned."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qtool.workspaces.journal import Journal


class Died(BaseException):
    """As sudden as a signal: nothing catches it."""


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


def damage(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


KILLED = """
import os, signal, sys
from qtool.workspaces.journal import Journal
from qtool.cli.main import main
commit = Journal.commit
def killed(*given, **content):
    commit(*given, **content)
    os.kill(os.getpid(), signal.SIGKILL)
Journal.commit = killed
sys.argv = ["qtool", *sys.argv[1:]]
main()
"""
