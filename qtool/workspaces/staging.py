"""The output folder or file appears under its final name only when it is whole.

Every byte is on the disk before the output gets its name, so that this holds after a power cut too.
Work goes into a hidden one beside it, which is renamed at the end and removed on any failure.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from qtool.errors import QtoolError, UnsupportedError
from qtool.workspaces.replacing import Replace, check_replaceable, is_replaceable, put_back, swap

Error = TypeVar("Error", bound=BaseException)


def partial(target: Path) -> Path:
    """The hidden folder beside an output in which it is made (qtool.workspaces.workspace)."""
    return target.parent / f".{target.name}.partial"


def check_out(out: Path, replace: Replace | None = None) -> None:
    """UnsupportedError where `out` is taken: nothing of the user's is overwritten, but for an
    artifact that may be replaced."""
    _require_name(out)
    put_back(out)
    if out.is_dir():
        if is_filled(out):
            if replace is None:
                # What is nobody's artifact may be all that somebody has.
                ours = is_replaceable(out)
                way = "remove it, choose another -o, or give --replace"
                raise UnsupportedError(
                    f"{out}: the output folder exists and is not empty; "
                    f"{way if ours else 'choose another -o'}"
                )
            check_replaceable(out, replace)
        if os.path.ismount(os.path.realpath(out)):
            raise UnsupportedError(
                f"{out}: is a mount point, which a finished folder cannot replace; name a folder "
                "inside it with -o"
            )
    elif out.exists() or out.is_symlink():
        what = "a file" if out.exists() else "a link that leads nowhere"
        raise UnsupportedError(f"{out}: {what} is in the way; choose another -o")


@contextmanager
def staged(out: Path, replace: Replace | None = None) -> Iterator[Path]:
    """A folder to fill; it becomes `out` when the body ends without an exception."""
    check_out(out, replace)
    # Through links: a folder cannot be renamed over a link to one.
    target = Path(os.path.realpath(out))
    with made_parents(target, out):
        with explained(out):
            folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            folder.chmod(0o777 & ~umask())
            yield folder
            check_out(out, replace)
            give_name(folder, target, out)
            shutil.rmtree(folder, ignore_errors=True)  # what had the name before
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, QtoolError) and str(folder) in str(error):
                # Nobody knows the hidden folder.
                raise type(error)(str(error).replace(str(folder), str(out))) from error
            raise


def check_out_file(out: Path, replace: Replace | None = None) -> None:
    """UnsupportedError where a file `out` cannot be made, or is there already and stays."""
    _require_name(out)
    if out.is_dir():
        raise UnsupportedError(f"{out}: is a folder; name the file to make with -o")
    if out.exists() and not out.is_file():
        raise UnsupportedError(
            f"{out}: is no plain file, but a device or a pipe; choose another -o"
        )
    if out.exists() or out.is_symlink():
        if replace is None:
            way = ", or give --replace" if out.suffix.lower() == ".gguf" else ""
            raise UnsupportedError(f"{out}: exists; remove it or choose another -o{way}")
        check_replaceable(out, replace)


def _require_name(out: Path) -> None:
    """UnsupportedError for nothing, `.` and `/`."""
    if not out.name:
        what = (
            "the root of all folders"
            if out.is_absolute()
            else "nothing but the folder that this runs in"
        )
        raise UnsupportedError(f"-o names {what}; name the folder or file to make")


def free_bytes(out: Path) -> int:
    """Bytes that the disk of `out` has left."""
    above = (path for path in Path(os.path.realpath(out)).parents if path.exists())
    with explained(out):
        return shutil.disk_usage(next(above)).free


def check_space(out: Path, nbytes: int) -> None:
    """UnsupportedError where the disk of `out` has less than `nbytes` left."""
    free = free_bytes(out)
    if free < nbytes:
        raise UnsupportedError(
            f"{out}: needs {nbytes:,} bytes, and its disk has {free:,} left; "
            "free some space or choose another -o"
        )


# Without the times of the file; not every system has it.
sync = getattr(os, "fdatasync", os.fsync)


@contextmanager
def staged_file(
    out: Path, nbytes: int, replace: Replace | None = None
) -> Iterator[tuple[Path, int]]:
    """A file of `nbytes` to fill, by name and by descriptor; becomes `out` when the body ends."""
    check_out_file(out, replace)
    target = Path(os.path.realpath(out))
    check_space(out, nbytes)
    with made_parents(target, out):
        with explained(out):
            descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        path = Path(name)
        try:
            try:
                os.fchmod(descriptor, 0o666 & ~umask())
                yield path, descriptor
            finally:
                os.close(descriptor)
            check_out_file(out, replace)
            give_name(path, target, out)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


@contextmanager
def made_parents(target: Path, out: Path) -> Iterator[None]:
    """Makes the folders above `target`, and removes them again when the body fails."""
    made: list[Path] = []
    try:
        with explained(out):
            for parent in reversed(target.parents):
                if not parent.exists():
                    parent.mkdir()
                    made.append(parent)
                    _sync_folder(parent.parent)
        yield
    except BaseException as error:
        _remove(made)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = UnsupportedError(
                f"{out}: the disk is full; free some space or choose another -o"
            )
            raise with_notes(full, error) from None
        raise


def with_notes(new: Error, old: BaseException) -> Error:
    """An exception that takes another's place, with what was added to that one."""
    for note in getattr(old, "__notes__", ()):
        new.add_note(note)
    return new


@contextmanager
def explained(out: Path) -> Iterator[None]:
    """What the system says against making `out`, as a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UnsupportedError(
                f"{out}: the disk is full; free some space or choose another -o"
            ) from None
        raise UnsupportedError(
            f"{out}: cannot be made: {error.strerror}; choose another -o"
        ) from None


def is_filled(path: Path) -> bool:
    """Whether it is a folder with something in it, which no rename takes the place of."""
    return path.is_dir() and any(path.iterdir())


def clear_beside(folder: Path, files: Set[str]) -> None:
    """Remove what an earlier run wrote beside its `files`, of tensors: it is written anew."""
    for path in folder.iterdir():
        if path.name not in files:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def give_name(staged: Path, target: Path, out: Path) -> None:
    """Rename when all that it holds is on the disk, over an empty folder of that name, too.

    Over what else is there only after check_out; a folder is then what `staged` names.
    """
    with explained(out):
        _make_durable(staged)
    kind = "folder" if staged.is_dir() else "file"
    try:
        if is_filled(target):
            swap(staged, target)
        else:
            os.rename(staged, target)
    except OSError as error:
        raise UnsupportedError(
            f"{out}: the finished {kind} cannot be given this name: {error.strerror}; "
            "choose another -o"
        ) from None
    _sync_folder(target.parent)
    if staged.parent != target.parent:
        _sync_folder(staged.parent)


def _make_durable(staged: Path) -> None:
    """A name given before its bytes are on the disk may outlive them."""
    if not staged.is_dir():
        sync_file(staged)
        return
    for folder, _, names in os.walk(staged, topdown=False):
        for name in names:
            sync_file(Path(folder, name))
        _sync_folder(Path(folder))


def sync_file(path: Path) -> None:
    """Its bytes are on the disk then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """The names in it. Not every file system can, and those that cannot do it by themselves."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(made: list[Path]) -> None:
    """The parents that were made for the folder, unless somebody else uses them by now."""
    for parent in reversed(made):
        try:
            parent.rmdir()
        except OSError:
            break


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
