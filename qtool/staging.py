"""The output folder appears under its final name only when it is whole.

Work goes into a hidden folder beside it, which is renamed at the end and removed on any failure.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qtool.errors import UnsupportedError


def check_out(out: Path) -> None:
    """UnsupportedError where `out` is taken: nothing of the user's is ever overwritten."""
    if out.is_dir():
        if any(out.iterdir()):
            raise UnsupportedError(
                f"{out}: the output folder exists and is not empty; remove it or choose another -o"
            )
        if os.path.ismount(os.path.realpath(out)):
            raise UnsupportedError(
                f"{out}: is a mount point, which a finished folder cannot replace; name a folder "
                "inside it with -o"
            )
    elif out.exists() or out.is_symlink():
        raise UnsupportedError(f"{out}: a file is in the way; choose another -o")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder to fill; it becomes `out` when the body ends without an exception."""
    check_out(out)
    # Through links: a folder cannot be renamed over a link to one.
    target = Path(os.path.realpath(out))
    made: list[Path] = []
    try:
        for parent in reversed(target.parents):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        _remove(made)
        raise UnsupportedError(
            f"{out}: cannot be made: {error.strerror}; choose another -o"
        ) from None
    try:
        folder.chmod(0o777 & ~_umask())
        yield folder
        check_out(out)
        _give_name(folder, target, out)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        _remove(made)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UnsupportedError(
                f"{out}: the disk is full; free some space or choose another -o"
            ) from None
        raise


def _give_name(folder: Path, target: Path, out: Path) -> None:
    """Rename, over an empty folder of that name, too."""
    try:
        os.rename(folder, target)
    except OSError as error:
        raise UnsupportedError(
            f"{out}: the finished folder cannot be given this name: {error.strerror}; "
            "choose another -o"
        ) from None


def _remove(made: list[Path]) -> None:
    """The parents that were made for the folder, unless somebody else uses them by now."""
    for parent in reversed(made):
        try:
            parent.rmdir()
        except OSError:
            break


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
