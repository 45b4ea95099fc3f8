"""The last step of a run: what it made gets the name of the output, whenever the run is killed.

A folder that takes the place of another is called `whole` while the two trade their names. What is
in `ended` from before then tells which of the two `whole` is after a kill: the finished one, which
the same command goes on with, or the earlier one, which may go.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qtool.runs.identity import file_facts
from qtool.runs.lock import ENDED
from qtool.runs.staging import explained, give_name, is_filled, sync_file

Stating = Callable[[Path], Path]  # a finished output -> the file beside it that speaks of it


def name(folder: Path, target: Path, out: Path, stating: Stating | None) -> None:
    """`artifact` of a hidden folder becomes `target`, with what is to lie beside it."""
    artifact, whole, ended = folder / "artifact", folder / "whole", folder / ENDED
    with _stated(artifact, stating):
        if not is_filled(target):
            with explained(out):
                ended.touch()
            give_name(artifact, target, out)
            return
        with explained(out):
            ended.write_text(json.dumps(_seen(artifact)), encoding="utf-8")
            sync_file(ended)
            os.rename(artifact, whole)
        try:
            give_name(whole, target, out)
        except BaseException:
            if _is_finished(whole, folder):  # which has not got the name
                os.rename(whole, artifact)
            raise


def take_up(folder: Path) -> None:
    """A finished output that was to trade names is `artifact` again; an earlier one is removed."""
    whole = folder / "whole"
    if whole.exists():
        if _is_finished(whole, folder):
            os.rename(whole, folder / "artifact")
        else:
            shutil.rmtree(whole)
    (folder / ENDED).unlink(missing_ok=True)


def is_given(folder: Path, target: Path) -> bool:
    """Whether the run of a hidden folder was killed after `target` was its output."""
    there = {path.name for path in folder.iterdir()}
    if "lock" not in there or "artifact" in there:
        return False
    if "whole" in there:
        return _is_finished(target, folder)
    return ENDED in there or there == {"lock"}


def _is_finished(place: Path, folder: Path) -> bool:
    """Whether what lies there is what the run made."""
    try:
        said = json.loads((folder / ENDED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return bool(said == _seen(place))


def _seen(place: Path) -> list[Any]:
    """What tells one folder from another; no renaming changes it."""
    return [
        [path.relative_to(place).as_posix(), *file_facts(path)]
        for path in sorted(place.rglob("*"))
        if path.is_file()
    ]


@contextmanager
def _stated(artifact: Path, stating: Stating | None) -> Iterator[None]:
    """What is to lie beside an output is there before it, and gone where the body fails."""
    made = None if stating is None else stating(artifact)
    try:
        yield
    except BaseException:
        if made is not None:
            made.unlink(missing_ok=True)
        raise
