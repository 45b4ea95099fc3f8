"""The lock of a hidden folder in which work goes on: one process at a time, and only in our own.

    FOLDER/lock     "qtool " and the number of the process that holds it, or held it last
    FOLDER/ended    the work is done: nothing in it is to be gone on with
    .OUT.ended      the same, beside `.OUT.partial`, from just before that goes: the last that does

The system lets go of it when the process ends, however that is. It begins with a mark, so that a
folder that somebody else made under the same name is told, and left alone.
"""

import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from qtool.errors import ResumeError

try:
    import fcntl
except ImportError:  # Windows: two runs on one output are then not kept apart
    fcntl = None  # type: ignore[assignment]

_MARK = b"qtool "  # begins every lock: a folder without it was made by somebody else
ENDED = "ended"
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def acquire(folder: Path, out: Path) -> int:
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
                        remove(folder)
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


def empty(folder: Path, *, but: str = "lock") -> None:
    """Remove all but the lock, and that the work is done last. but: and but for this."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == ENDED):
        if path.name in ("lock", but):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(folder: Path) -> None:
    """Remove the folder, the lock last: who gets it finds nothing else. What tells that the work is
    done goes after it, in one step, so that there is no moment at which only half is known."""
    with suppress(OSError):
        empty(folder, but=ENDED)
        ended, last = folder / ENDED, ended_beside(folder)
        # What lies there may be somebody else's.
        told = is_ended(ended) and (is_ended(last) or not os.path.lexists(last))
        if told:
            os.rename(ended, last)
        else:
            ended.unlink(missing_ok=True)
        (folder / "lock").unlink()
        folder.rmdir()
        if told:
            forget(folder)


def ended_beside(folder: Path) -> Path:
    """Where `ended` of a hidden folder is for the moment after that is gone."""
    return folder.with_name(f"{folder.name.removesuffix('.partial')}.{ENDED}")


def is_ended(path: Path) -> bool:
    """Whether it is an `ended` that a run wrote."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and "seen" in said and "stated" in said


def forget(folder: Path) -> None:
    """Remove what tells beside a folder that the work in it was done."""
    last = ended_beside(folder)
    if is_ended(last):
        last.unlink(missing_ok=True)
