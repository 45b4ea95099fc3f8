"""Where `calibrate` makes its files: they get their names when they are whole, the statistics last.

A run that was killed just after that is told finished by the same command (workspaces/already.py).
Where there are two files, a line of the journal says of both that they are whole before the first
has its name: the same command then gives them the names that they lack.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.checkpoints.checkpoint import hash_file
from qtool.checkpoints.gguf_models import source_files
from qtool.errors import SourceError
from qtool.gguf.importance.imatrix import Importance, write_importance
from qtool.provenance.record import environment
from qtool.workspaces import already, program
from qtool.workspaces.differences import DEVICE, AnotherRun, told
from qtool.workspaces.identity import file_facts
from qtool.workspaces.journal import as_noted
from qtool.workspaces.staging import explained, partial, staged_file
from qtool.workspaces.watched import marks
from qtool.workspaces.workspace import COMMAND, Workspace, kept_journal, workspace

BESIDE = "beside"  # of what a run says it made: the importance matrix, where it made both
_BOTH = "both"  # the line on two files that are whole
_IMATRIX = "artifact.imatrix"  # the importance matrix in the hidden folder of the statistics
_COMMAND = "calibrate"


@dataclass(frozen=True)
class Measured:
    """What was written."""

    sites: int
    tokens: int
    unseen: tuple[str, ...]  # experts that no token was routed to
    importance: Importance | None = None  # none of a run that was killed when it was finished
    notes: tuple[str, ...] = ()  # on the importance
    record: Mapping[str, Any] | None = None  # the importance's

    def json(self) -> dict[str, Any]:
        """For the same command, where this run is killed now."""
        return {
            "sites": self.sites,
            "tokens": self.tokens,
            "unseen": self.unseen,
            "notes": self.notes,
            "record": self.record,
        }


def measured_before(made: Mapping[str, Any]) -> Measured:
    """By what that said."""
    unseen, notes = tuple(made["unseen"]), tuple(made["notes"])
    return Measured(made["sites"], made["tokens"], unseen, None, notes, made["record"])


def check_absent(
    out: Path | None, imatrix: Path | None = None, facts: Mapping[str, Any] | None = None
) -> None:
    """SourceError where a file to be written is there already, or cannot be made there; but of a
    run that was killed when it was finished, or between two names. facts: what that is to be of;
    before anything is read it may be of any."""
    if _seem_finished(out, imatrix):
        return
    for path in (out, None if _has_name(out, imatrix, facts) else imatrix):
        if path is None:
            continue
        if path.is_dir():
            raise SourceError(f"{path}: is a folder; name the file to make")
        if path.exists() and not path.is_file():
            raise SourceError(
                f"{path}: is no plain file, but a device or a pipe; choose another name"
            )
        if path.exists() or path.is_symlink():
            raise SourceError(f"{path}: exists; remove it or choose another name")
        above = next(one for one in Path(os.path.realpath(path)).parents if one.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise SourceError(
                f"{path}: cannot be written, {above} is no folder in which files may be made; "
                "choose another name"
            )


def _seem_finished(out: Path | None, imatrix: Path | None) -> bool:
    """Whether a run was killed just after it had named these files, whatever it was of."""
    last = out or imatrix
    if last is None:
        return False
    target = Path(os.path.realpath(last))
    before = already.earlier(partial(target), target)
    if before is None or imatrix is None or out is None:
        return before is not None
    return imatrix.exists() and before.made.get(BESIDE) == already.seen(imatrix)


def _has_name(out: Path | None, imatrix: Path | None, facts: Mapping[str, Any] | None) -> bool:
    """Whether an importance matrix is that of a run that was killed before it named `out`; of other
    facts it is refused."""
    if out is None or imatrix is None or not imatrix.is_file():
        return False
    with kept_journal(out) as journal:
        both = None if journal is None else journal.done.get(_BOTH)
        if journal is None or both is None or _digest(imatrix) != both["imatrix"]:
            return False
        before, now = journal.facts, as_noted(dict(facts or {}))
        others = {key: (before.get(key), one) for key, one in now.items()}
        if others := {key: pair for key, pair in others.items() if pair[0] != pair[1]}:
            raise AnotherRun(
                f"{imatrix}: is of a run that was killed before {out} had its name, and this "
                f"command is not the one that began it: {told(others)}; to start over, remove it"
            )
        return True


def _digest(file: Path) -> str | None:
    try:
        return hash_file(file)
    except SourceError:
        return None


def facts_of(
    model: Path, calibration: Mapping[str, Any], needs: frozenset[str], gpu: str | None,
    out: Path | None, imatrix: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """What the files depend on."""
    return {
        COMMAND: _COMMAND,
        **program.facts(),
        "source": [file_facts(file) for file in source_files(model)],
        "calibration text": dict(calibration),
        "what is measured": [sorted(needs), out is not None, imatrix is not None],
        DEVICE: "cpu" if gpu is None else gpu,
        "version of torch or kind of CPU": environment(),
    }


def place(
    model: Path, out: Path | None, imatrix: Path | None, facts: Mapping[str, Any]
) -> AbstractContextManager[Workspace]:
    """A place for the file that is named last; AlreadyMade with `agree` where it was."""
    last = out or imatrix
    assert last is not None
    check_absent(out, imatrix, facts)

    def stale(before: Mapping[str, Any]) -> bool:
        return before.get(COMMAND) == _COMMAND and before != as_noted(dict(facts))

    return workspace(
        last,
        is_folder=False,
        nbytes=0,
        fresh=None,
        sources=marks(source_files(model)),
        stale=stale,
        facts=facts,
    )


def measured_both(space: Workspace) -> Measured | None:
    """What an earlier run made that was killed before both of its files had their names."""
    both, made = space.journal.done.get(_BOTH), space.artifact
    if both is None or not made.is_file() or already.seen(made) != both["statistics"]:
        return None
    if _digest(space.folder / _IMATRIX) != both["imatrix"]:
        return None
    return measured_before(both["made"])


def keep_both(space: Workspace, made: Measured) -> None:
    """The statistics are whole: so is the importance matrix now, and neither has its name."""
    assert made.importance is not None
    imatrix = space.folder / _IMATRIX
    imatrix.unlink(missing_ok=True)
    write_importance(imatrix, made.importance)
    statistics = already.seen(space.artifact)
    space.journal.commit(_BOTH, made=made.json(), statistics=statistics, imatrix=_digest(imatrix))


def name_imatrix(space: Workspace, path: Path) -> None:
    """Before the statistics get theirs. It may be on another disk than they are."""
    made = space.folder / _IMATRIX
    if path.is_file() and _digest(path) == space.journal.done[_BOTH]["imatrix"]:
        return
    with (
        staged_file(path, made.stat().st_size) as (_, descriptor),
        explained(path),
        made.open("rb") as source,
        open(descriptor, "wb", closefd=False) as target,
    ):
        shutil.copyfileobj(source, target)
