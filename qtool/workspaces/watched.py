"""What a run relies on while it is at work: its hidden folder, room on the disk, its source.

Looked at before each step is taken for finished and before the output gets its name. A step counts
when its source was until then as it was when the work began, so work on two sources never mixes.
Times of files are compared for being equal only; which of two is later, and what the clock says,
means nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qtool.errors import TOO_LARGE, QtoolError, ResumeError, SourceError, UnsupportedError
from qtool.workspaces.identity import looked_at
from qtool.workspaces.staging import free_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Mark:
    """A file as it was when the work began."""

    size: int
    time: int
    place: tuple[int, int]  # which file it is, for as long as its disk stays where it is
    content: str  # some of it

    def state(self, path: Path) -> str:
        """What has become of it: same, changed or gone."""
        try:
            found = path.stat()
            if (found.st_size, found.st_mtime_ns) != (self.size, self.time):
                return "changed"
            # Of disks that are reached over a network the same file may be another number later.
            same = (found.st_dev, found.st_ino) == self.place or looked_at(path) == self.content
            return "same" if same else "changed"
        except OSError:
            # What is open can still be read to its end; what has to be opened will tell.
            return "gone"


Marks = Mapping[Path, Mark]


def marks(files: Iterable[Path]) -> dict[Path, Mark]:
    """How each file is now; SourceError where one is not there."""
    found = {}
    for path in files:
        try:
            is_now = path.stat()
            place = is_now.st_dev, is_now.st_ino
            found[path] = Mark(is_now.st_size, is_now.st_mtime_ns, place, looked_at(path))
        except OSError as error:
            raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    return found


@dataclass(frozen=True)
class Watched:
    """The world of one run as it was when the work began."""

    out: Path  # as the user named it
    folder: Path
    lock: int  # descriptor
    nbytes: int  # what the disk has to hold in the end
    sources: Marks

    def __call__(self) -> None:
        """QtoolError where the work cannot go on, or would come to nothing."""
        self.same()
        self.check_space()

    def same(self) -> None:
        """ResumeError where the folder is no longer ours, or the source another one."""
        if not self.ours():
            raise self._taken()
        for path in self.sources:
            if self.sources[path].state(path) == "changed":
                raise self._changed(path)

    def ours(self) -> bool:
        """Whether the folder is still the one that was locked."""
        try:
            return os.path.samestat(os.stat(self.folder / "lock"), os.fstat(self.lock))
        except OSError:
            return False

    def missing(self) -> int:
        """Bytes that the disk lacks for the rest of the output."""
        return self.nbytes - used(self.folder) - free_bytes(self.out)

    def check_space(self) -> None:
        """UnsupportedError, as of a full disk, where the rest of the output has no room."""
        missing = self.missing()
        if missing > 0:
            raise self._full(missing) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def explained(self, error: BaseException) -> QtoolError | None:
        """Why the work has failed, where that is not what was to be done but what became of the
        folder, the source or the disk meanwhile; None else."""
        system = [one for one in _beneath(error) if isinstance(one, OSError)]
        if not isinstance(error, QtoolError) and not system:
            return None
        if not self.ours():
            return self._taken()
        for path in self.sources:
            state = self.sources[path].state(path)
            if state == "gone" and not any(one.errno in FULL for one in system):
                return SourceError(
                    f"{path}: was there when the work began, and is gone; put it back as it was "
                    "and give the same command again"
                )
            if state == "changed":
                return self._changed(path)
        if any(one.errno in FULL for one in system):
            return self._full(self.missing())
        if any(one.errno == errno.EFBIG for one in system):
            return UnsupportedError(f"{self.out}: {TOO_LARGE}")
        if isinstance(error, OSError) and self._within(error.filename):
            return UnsupportedError(f"{self.out}: cannot be written ({error.strerror})")
        return None

    def _within(self, name: object) -> bool:
        """Whether a file of an error is one of ours; none is named where one is at work open."""
        return name is None or self.folder in Path(os.fsdecode(str(name))).parents

    def _taken(self) -> ResumeError:
        return ResumeError(
            f"{self.out}: {self.folder.name} beside it, where the work was going on, was removed; "
            "give the same command again to start over"
        )

    def _changed(self, path: Path) -> ResumeError:
        return ResumeError(
            f"{path}: was changed while the work was going on; put it back as it was, or give the "
            "same command with --fresh to start over with what is there now"
        )

    def _full(self, missing: int) -> UnsupportedError:
        if missing <= 0:  # of a quota, or of somebody else who has taken and given back
            return UnsupportedError(
                f"{self.out}: the disk is full; free some space or choose another -o"
            )
        return UnsupportedError(
            f"{self.out}: the disk is full: the rest of it needs {missing:,} bytes more than are "
            "free; free some space or choose another -o"
        )


def used(folder: Path) -> int:
    """Bytes on the disk that a run has already."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # states that are needed no more
            total += path.lstat().st_blocks * 512
    return total


def _beneath(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__
