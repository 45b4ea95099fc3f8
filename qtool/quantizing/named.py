"""Where `calibrate` makes its files: they get their names when they are whole, the statistics last.

A run that was killed just after that is told finished by the same command (workspaces/already.py).
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.checkpoints.gguf_models import source_files
from qtool.errors import SourceError
from qtool.gguf.importance.imatrix import Importance
from qtool.provenance.record import environment
from qtool.workspaces import already, program
from qtool.workspaces.differences import DEVICE
from qtool.workspaces.identity import file_facts
from qtool.workspaces.staging import partial
from qtool.workspaces.watched import marks
from qtool.workspaces.workspace import COMMAND, Workspace, workspace

BESIDE = "beside"  # of what a run says it made: the importance matrix, where it made both


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


def check_absent(out: Path | None, imatrix: Path | None = None) -> None:
    """SourceError where a file to be written is there already, or cannot be made there; but of a
    run that was killed when it was finished, as far as can be told before anything is read."""
    if _seem_finished(out, imatrix):
        return
    for path in (out, imatrix):
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


def facts_of(
    model: Path, calibration: Mapping[str, Any], needs: frozenset[str], gpu: str | None,
    out: Path | None, imatrix: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """What the files depend on."""
    return {
        COMMAND: "calibrate",
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
    sources = marks(source_files(model))
    return workspace(last, is_folder=False, nbytes=0, fresh=False, sources=sources, facts=facts)
