"""Where an output is made, so that a run that dies can go on: a hidden folder beside the output.

    .OUT.partial/
        lock        held by the process at work; the system lets go of it when the process ends
        journal     what the run is, and what of it is finished (qtool.runs.journal)
        artifact    the output, a folder or a file, which gets its name when it is whole
        ...         what a stage keeps to go on with
    .OUT.from-gguf/ where the source had to be made first: a lock, and the source

A run that is ended, or that the system stops (a full disk, a source that is gone), leaves the
folder where something in it is finished, and the same command goes on from there. Else nothing is
left.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError, ResumeError
from qtool.runs.journal import Journal
from qtool.runs.staging import (
    check_out,
    check_out_file,
    check_space,
    explained,
    give_name,
    made_parents,
    partial,
    with_notes,
)
from qtool.runs.watched import Marks, Watched

try:
    import fcntl
except ImportError:  # Windows: two runs on one output are then not kept apart
    fcntl = None  # type: ignore[assignment]


_MARK = b"qtool "  # begins every lock: a folder without it was made by somebody else
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True)
class Workspace:
    """The hidden folder of one run, locked."""

    out: Path  # as the user named it
    folder: Path
    journal: Journal

    @property
    def artifact(self) -> Path:
        """The output under way."""
        return self.folder / "artifact"

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Note what this run is made of; ResumeError where the unfinished one was made of other.

        facts: by the name that a person knows them by: recipe, source, calibration ...
        """
        for name, value in facts.items():
            self.journal.agree(
                name,
                value,
                f"{self.out}: an unfinished run with another {name} is kept beside it "
                f"({self.folder.name}, {_units(self.journal)}); give its command again to finish "
                "it, or this one with --fresh to start over",
            )


@contextmanager
def workspace(
    out: Path, *, is_folder: bool, nbytes: int, fresh: bool, sources: Marks | None = None
) -> Iterator[Workspace]:
    """A place to make `out` in; `out` is there when the body ends without an exception.

    nbytes: what the disk has to hold. fresh: throw away what an earlier run left. sources: the
    files that it is made of, as they were when they were opened.
    """
    target = Path(os.path.realpath(out))
    folder = partial(target)
    check_free(out, is_folder=is_folder)
    with made_parents(target, out):
        with explained(out):
            lock = _acquire(folder, out)
        kept = ended = False
        journal = None
        look = Watched(out, folder, lock, nbytes, sources or {})
        try:
            check_free(out, is_folder=is_folder)  # a run that had the lock before may have made it
            journal = Journal(folder / "journal", look)
            if fresh or not journal.done:
                journal.close()
                empty(folder)
                journal = Journal(folder / "journal", look)
            space = Workspace(out, folder, journal)
            if journal.done:
                look.check_space()
            else:
                check_space(out, nbytes)
            if is_folder:
                with explained(out):
                    space.artifact.mkdir(exist_ok=True)
            yield space
            ended = True
            look.same()
            check_free(out, is_folder=is_folder)
            give_name(space.artifact, target, out)
        except BaseException as error:
            why = look.explained(error)
            done = journal is not None and bool(journal.done) and look.ours()
            if kept := done and (ended or why is not None or _may_pass(error)):
                assert journal is not None
                error.add_note(
                    f"what is finished is kept ({_units(journal)}): the same command goes on from "
                    "there, --fresh starts over"
                )
            if why is not None:
                raise with_notes(why, error) from error
            if isinstance(error, QtoolError) and str(folder) in str(error):
                # Nobody knows the hidden folder.
                said = str(error).replace(str(folder / "artifact"), str(out))
                raise with_notes(type(error)(said), error) from error
            raise
        finally:
            if journal is not None:
                journal.close()
            if not kept and look.ours():
                _remove(folder)
            os.close(lock)
            _sweep_sources(target, out)


@contextmanager
def made_beside(out: Path) -> Iterator[Path]:
    """A hidden folder for a source of `out` that has to be made first, locked.

    It is there again when the same command goes on, and gone when `out` is whole or given up.
    """
    target = Path(os.path.realpath(out))
    folder = _source(target)
    with made_parents(target, out):
        with explained(out):
            lock = _acquire(folder, out)
        try:
            yield folder
        finally:
            os.close(lock)
            _sweep_sources(target, out)


def _source(target: Path) -> Path:
    return target.parent / f".{target.name}.from-gguf"


def _sweep_sources(target: Path, out: Path) -> None:
    """Remove what an output was to be made of, where no run of it is left to go on."""
    folder = _source(target)
    if partial(target).exists() or not (folder / "lock").is_file():
        return
    with suppress(QtoolError, OSError):  # it is in use, or not ours
        lock = _acquire(folder, out)
        _remove(folder)
        os.close(lock)


def _acquire(folder: Path, out: Path) -> int:
    """The descriptor of the lock of `folder`, which is made where it is not there.

    ResumeError where another process holds it, or where the folder is not one that qtool made:
    nothing of other people's is ever written to, or removed.
    """
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        path = folder / "lock"
        try:
            _check_ours(folder, out)
            others = [one for one in folder.iterdir() if one != path]
            if not path.exists() and any(map(os.path.lexists, others)):  # the lock goes last
                raise _not_ours(folder, out)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o600)
        except FileNotFoundError:
            continue  # another run has just removed the folder
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor)):
                marked = os.pread(descriptor, len(_MARK), 0) == _MARK
                if not all(map(_plain, folder.rglob("*"))) or not (
                    marked or [*folder.iterdir()] == [path]
                ):
                    raise _not_ours(folder, out)
                try:
                    os.pwrite(descriptor, _MARK + b"%-12d\n" % os.getpid(), 0)
                except OSError:  # of a full disk
                    if not marked:  # what is kept later would not be known as ours
                        _remove(folder)
                        raise
                return descriptor
            os.close(descriptor)  # of a folder that has been removed in between
        except BlockingIOError:
            said = os.pread(descriptor, 40, 0).decode("ascii", "replace").split()
            os.close(descriptor)
            who = f" (process {said[-1]})" if said else ""
            raise ResumeError(
                f"{out}: another qtool is making it{who}; wait for it, or choose another -o"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise


def _check_ours(folder: Path, out: Path) -> None:
    """ResumeError where `folder` is a link, a file, or somebody else's."""
    found = folder.lstat()
    mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
    if not stat.S_ISDIR(found.st_mode) or not mine:
        raise _not_ours(folder, out)


def _plain(path: Path) -> bool:
    """Whether it is a file or a folder: of links and the like qtool makes none."""
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _not_ours(folder: Path, out: Path) -> ResumeError:
    return ResumeError(
        f"{out}: {folder.name} beside it, where work would go, was not made by qtool; remove it or "
        "choose another -o"
    )


def check_free(out: Path, *, is_folder: bool) -> None:
    """UnsupportedError where `out` is there already."""
    if out.exists():
        _sweep(out)
    (check_out if is_folder else check_out_file)(out)


def _sweep(out: Path) -> None:
    """Remove what is left where a run was killed just after its output got its name."""
    target = Path(os.path.realpath(out))
    folder = partial(target)
    _sweep_sources(target, out)
    if not (folder / "lock").is_file() or (folder / "artifact").exists():
        return
    with suppress(QtoolError, OSError):  # it is in use, or not ours
        lock = _acquire(folder, out)
        if not (folder / "artifact").exists():
            _remove(folder)
        os.close(lock)
        _sweep_sources(target, out)


def empty(folder: Path) -> None:
    """Remove all but the lock."""
    for path in folder.iterdir():
        if path.name == "lock":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove(folder: Path) -> None:
    """Remove the folder, the lock last: who gets it finds nothing else."""
    with suppress(OSError):
        empty(folder)
        (folder / "lock").unlink()
        folder.rmdir()


def _may_pass(error: BaseException) -> bool:
    """Whether the same command may get further: after a signal, or what the system refused.

    What is wrong with the source or the recipe stays wrong, and mending it makes another run.
    """
    if not isinstance(error, QtoolError) or isinstance(error, ResumeError):
        return True
    beneath: BaseException | None = error
    while beneath is not None:
        if isinstance(beneath, OSError | MemoryError):
            return True
        beneath = beneath.__cause__ or beneath.__context__
    return False


def _units(journal: Journal) -> str:
    count = len(journal.done)
    return "1 step" if count == 1 else f"{count} steps"
