"""Runs that are killed just after their output has its name, before all else of them is gone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qtool.workspaces import naming, workspace


class Killed(BaseException):
    """As sudden as a signal: nothing catches it."""


def killed_named(work: Callable[[], object], out: Path) -> None:
    """It leaves what a kill would leave."""
    give_name = naming.give_name

    def killed(*given: Path) -> None:
        give_name(*given)
        raise Killed

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(naming, "give_name", killed)
        patched.setattr(workspace, "remove", lambda folder: None)
        work()
    assert out.exists() and (out.with_name(f".{out.name}.partial") / "ended").is_file()
