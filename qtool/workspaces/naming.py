"""The last step of a run: what it made gets the name of the output, whenever the run is killed.

A folder that takes the place of another is called `whole` while the two trade their names. What is
in `ended` from before then tells which of the two `whole` is after a kill: the finished one, which
the same command goes on with, or the earlier one, which may go.
A statement of the one must never lie beside the other: where one is replaced, the earlier statement
goes before and the new one, `statement` until then, comes after.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qtool.workspaces.already import is_as_seen, seen
from qtool.workspaces.lock import ENDED, ended_beside, forget, is_ended
from qtool.workspaces.replacing import discard
from qtool.workspaces.staging import explained, give_name, is_filled, sync_file

# A finished output -> the file beside it that is to speak of it, and what that says.
Stating = Callable[[Path], tuple[Path, str]]
STATEMENT = "statement"


def name(
    folder: Path, target: Path, out: Path, stating: Stating | None, said: Mapping[str, Any]
) -> None:
    """`artifact` of a hidden folder becomes `target`, with what is to lie beside it. said: by the
    run, of itself (qtool.workspaces.already)."""
    artifact, whole, ended = folder / "artifact", folder / "whole", folder / ENDED
    with _stated(folder, target, stating):
        with explained(out):
            known = {"seen": seen(artifact), "stated": stating is not None, **said}
            ended.write_text(json.dumps(known), encoding="utf-8")
            sync_file(ended)
        if not is_filled(target):
            give_name(artifact, target, out)
            return
        with explained(out):
            os.rename(artifact, whole)
        try:
            give_name(whole, target, out)
        except BaseException:
            if is_as_seen(whole, folder):  # which has not got the name
                os.rename(whole, artifact)
            raise


def take_up(folder: Path) -> None:
    """A finished output that was to trade names is `artifact` again; an earlier one is removed."""
    whole = folder / "whole"
    if whole.exists():
        if is_as_seen(whole, folder):
            os.rename(whole, folder / "artifact")
        else:
            shutil.rmtree(whole)
    (folder / ENDED).unlink(missing_ok=True)
    forget(folder)


def is_given(folder: Path, target: Path) -> bool:
    """Whether the run of a hidden folder was killed after `target` was its output."""
    if not folder.exists():
        return is_ended(ended_beside(folder))
    there = {path.name for path in folder.iterdir()}
    if not there:  # the lock went last, and then the run was killed
        return True
    if "lock" not in there or "artifact" in there:
        return False
    if "whole" in there:
        return is_as_seen(target, folder)
    return ENDED in there or there == {"lock"}


def path_beside(artifact: Path) -> Path:
    """OUT.provenance.json."""
    return artifact.with_name(f"{artifact.name}.provenance.json")


def stays_beside(artifact: Path) -> str | None:
    """What is said where the statement of an earlier artifact stays beside a new one."""
    beside = path_beside(artifact)
    if not beside.is_file():
        return None
    return (
        f"{beside} is of an earlier {artifact.name}, and `qtool verify` compares with it: remove it"
    )


def finish(folder: Path, target: Path) -> None:
    """What a run left to do that was killed after `target` was its output."""
    discard(target, folder / "replaced")
    made, beside = folder / STATEMENT, path_beside(target)
    if made.is_file() and not os.path.lexists(beside):
        os.rename(made, beside)


@contextmanager
def _stated(folder: Path, target: Path, stating: Stating | None) -> Iterator[None]:
    """What is to lie beside an output is there before it, but after it where that replaces one;
    as it was before where the body fails."""
    if stating is None:
        yield
        return
    beside, text = stating(folder / "artifact")
    made, earlier = folder / STATEMENT, folder / "stated"
    made.write_text(text, encoding="utf-8")
    replaces = target.is_file() or is_filled(target)
    if beside.is_file():
        os.rename(beside, earlier)
    if not replaces:
        os.rename(made, beside)
    try:
        yield
    except BaseException:
        if (folder / "artifact").exists():  # which has not got the name
            beside.unlink(missing_ok=True)
            if earlier.exists():
                os.rename(earlier, beside)
        raise
    if replaces:
        os.rename(made, beside)
