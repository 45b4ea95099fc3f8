"""The hidden folder of a matrix, held by one process for as long as it works.

OUT/.matrix/
    lock            as of qtool.workspaces.lock, and with its sentence for the second
    <digest>/       statistics of one calibration text, while a run could use them
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qtool.workspaces.lock import acquire
from qtool.workspaces.staging import explained

WORK = ".matrix"


@contextmanager
def locked(out: Path) -> Iterator[Path]:
    """The folder `OUT/.matrix`; ResumeError where another process works in OUT.

    It is removed at the end where nothing is left in it.
    """
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = acquire(out / WORK, out)
    try:
        yield out / WORK
    finally:
        with suppress(OSError):
            if not left(out / WORK):
                (out / WORK / "lock").unlink()
                (out / WORK).rmdir()
        os.close(lock)


def left(work: Path) -> list[Path]:
    """What is kept in the folder beside its lock; folders without a file in them are removed."""
    found = sorted(path for path in work.iterdir() if path.name != "lock")
    for path in found:
        if not size_of([path]):
            remove(path)
    return [path for path in found if path.exists()]


def size_of(paths: Sequence[Path]) -> int:
    """Bytes of the files in some folders."""
    files = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
    return sum(file.stat().st_size for file in files)


def remove(path: Path) -> None:
    """Statistics that no run would use any more."""
    shutil.rmtree(path, ignore_errors=True)
