"""What runs leave that were killed at the last or the first moment: swept, so that a name is free.

.OUT.partial, .OUT.ended    where an output got its name just before (qtool.workspaces.naming)
.OUT.from-gguf/             the source of an output, where that had to be made first
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qtool.errors import QtoolError
from qtool.workspaces import already, naming
from qtool.workspaces.lock import acquire, forget, remove
from qtool.workspaces.replacing import Replace
from qtool.workspaces.staging import check_out, check_out_file, explained, made_parents, partial


def check_free(
    out: Path, *, is_folder: bool, replace: Replace | None = None, again: bool = False
) -> None:
    """UnsupportedError where `out` is there already, and may not be replaced. again: unless it is
    of a run that was killed then, which `workspace` knows by its facts."""
    if out.exists():
        target = Path(os.path.realpath(out))
        if again and already.earlier(partial(target), target) is not None:
            return
        _sweep(out)
    (check_out if is_folder else check_out_file)(out, replace)


def _sweep(out: Path) -> None:
    """Remove what is left where a run was killed just after its output got its name.

    An unfinished run is kept: what is there is then an older one, which it is to replace.
    """
    target = Path(os.path.realpath(out))
    folder = partial(target)
    sweep_sources(target, out)
    with suppress(QtoolError, OSError):  # there is none, it is in use, or not ours
        if not naming.is_given(folder, target):
            return
        lock = acquire(folder, out)
        if naming.is_given(folder, target):
            naming.finish(folder, target)
            remove(folder)
            forget(folder)
        os.close(lock)
        sweep_sources(target, out)


@contextmanager
def made_beside(out: Path) -> Iterator[Path]:
    """A hidden folder for a source of `out` that has to be made first, locked.

    It is there again when the same command goes on, and gone when `out` is whole or given up.
    """
    target = Path(os.path.realpath(out))
    folder = _source(target)
    with made_parents(target, out):
        with explained(out):
            lock = acquire(folder, out)
        try:
            yield folder
        finally:
            os.close(lock)
            sweep_sources(target, out)


def _source(target: Path) -> Path:
    return target.parent / f".{target.name}.from-gguf"


def sweep_sources(target: Path, out: Path) -> None:
    """Remove what an output was to be made of, where no run of it is left to go on."""
    folder = _source(target)
    if partial(target).exists() or not (folder / "lock").is_file():
        return
    with suppress(QtoolError, OSError):  # it is in use, or not ours
        lock = acquire(folder, out)
        remove(folder)
        os.close(lock)


def give_up(folder: Path, out: Path) -> None:
    """Remove a hidden folder of ours in which nothing was done yet."""
    with suppress(QtoolError, OSError):  # it is in use, or not ours
        lock = acquire(folder, out)
        if [path.name for path in folder.iterdir()] == ["lock"]:
            remove(folder)
        os.close(lock)
