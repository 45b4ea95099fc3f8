"""--replace: a finished output takes the place of an earlier one.

A file is renamed over the earlier one. Two folders trade their names in one step where the system
can do that (renameat2 of Linux, renamex_np of macOS); elsewhere the earlier one is renamed to
.OUT.replaced first, and a run that is killed before the second rename leaves that, which the next
command with this output renames back. What is replaced is an artifact and nothing else.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qtool.errors import UnsupportedError
from qtool.formats.gguf_cursor import begins_as_gguf
from qtool.record import FILE_NAME

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_WRITTEN = (
    "config.json", "qtool.json", "README.md", "model.safetensors.index.json",
    "quantize_config.json", "quant_config.json",
)  # fmt: skip
# Not every file system can trade names, and not every pair of folders.
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV)


@dataclass(frozen=True)
class Replace:
    """That an output may take the place of an earlier one, but never of these."""

    inputs: tuple[Path, ...]


def replace_of(source: Path, *others: Path) -> Replace:
    """Of a command that reads the model `source`, its files, and others."""
    from qtool.checkpoints.gguf_models import gguf_models, source_files

    models = gguf_models(source) or [source]
    return Replace((source, *(file for one in models for file in source_files(one)), *others))


def check_replaceable(out: Path, replace: Replace) -> None:
    """UnsupportedError unless `out`, which is there, is an artifact that nothing here stands on."""
    if out.is_symlink():
        raise UnsupportedError(
            f"{out}: is a link, which --replace leaves alone; name what it leads to with -o"
        )
    _check_inputs(out, replace.inputs)
    if not out.is_dir():
        if not (out.name.lower().endswith(".gguf") and begins_as_gguf(out)):
            raise UnsupportedError(
                f"{out}: is no GGUF file; --replace takes the place of those, whose names end in "
                ".gguf, and of folders that qtool made; remove it or choose another -o"
            )
        return
    foreign = _foreign(out)
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise UnsupportedError(
            f"{out}: holds {', '.join(foreign[:3])}{more}, which no artifact does, so that "
            "--replace leaves it alone; move that elsewhere or choose another -o"
        )
    if not (out / FILE_NAME).is_file():
        raise UnsupportedError(
            f"{out}: has no {FILE_NAME}, so that qtool did not make it and --replace leaves it "
            "alone; remove it or choose another -o"
        )


def is_replaceable(out: Path) -> bool:
    """Whether --replace would take what is there, as far as that can be told without its inputs."""
    try:
        check_replaceable(out, Replace(()))
    except UnsupportedError:
        return False
    return True


def check_apart(out: Path, *inputs: Path) -> None:
    """UnsupportedError where `out` is one of the inputs, or holds it."""
    target = Path(os.path.realpath(out))
    for given in inputs:
        real = Path(os.path.realpath(given))
        same = target.is_file() and real.is_file() and os.path.samefile(target, real)
        if same or (target.exists() and real.exists() and target in (real, *real.parents)):
            raise UnsupportedError(
                f"{out}: is what this command reads ({given}), or holds it, and cannot be "
                "replaced; choose another -o"
            )


def check_not_among(out: Path, source: Path) -> None:
    """UnsupportedError where a file `out` would be taken for one of the model's whose folder
    `source` is, or is in, from then on. Folders in there, and files of other kinds, are read by
    nobody; and where a file of GGUF is the source, many models lie in one folder."""
    from qtool.checkpoints.gguf_models import gguf_models

    whole = source.is_dir()
    folder = source if whole else source.parent
    if not whole and not (folder / "config.json").is_file():
        return
    if Path(os.path.realpath(out)).parent != Path(os.path.realpath(folder)):
        return
    kind = out.suffix.lower()
    if kind in (".safetensors", ".json") or (kind == ".gguf" and whole and gguf_models(source)):
        raise UnsupportedError(
            f"{out}: would lie among the files of {folder}, and be taken for one of that model's; "
            "name a file in another folder"
        )


def _check_inputs(out: Path, inputs: Sequence[Path]) -> None:
    target = Path(os.path.realpath(out))
    here = Path.cwd()
    if target == here or target in here.parents:
        raise UnsupportedError(
            f"{out}: is the working folder, or holds it, and cannot be replaced; choose another -o"
        )
    check_apart(out, *inputs)


def _foreign(folder: Path) -> list[str]:
    """What is in it that no artifact has: names relative to it, sorted."""
    from qtool.checkpoints.checkpoint import SIDE_PATTERNS

    patterns = [*SIDE_PATTERNS, *(["*.py"] if _has_own_code(folder) else [])]
    known = {path for pattern in patterns for path in folder.glob(pattern)}
    above = {path.parent for path in known} - {folder}
    known |= {
        path
        for path in folder.iterdir()
        if path.name in _WRITTEN or _WEIGHTS.fullmatch(path.name) is not None
    }
    files = {path for path in known if path.is_file() and not path.is_symlink()}
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path not in files and not (path in above and path.is_dir() and not path.is_symlink())
    )


def _has_own_code(folder: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        return "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return False


def replaced(target: Path) -> Path:
    """Where an earlier folder is for the moment between two renames."""
    return target.with_name(f".{target.name}.replaced")


def put_back(out: Path) -> None:
    """An earlier artifact gets its name again, where a run was killed before the new one had it."""
    target = Path(os.path.realpath(out))
    old = replaced(target)
    if not os.path.lexists(target) and _ours(old):
        with suppress(OSError):
            os.rename(old, target)


def discard(target: Path, place: Path) -> None:
    """An earlier artifact that is replaced goes to `place`, to be removed there: half removed it
    must not get its name again."""
    old = replaced(target)
    if _ours(old):
        shutil.rmtree(place, ignore_errors=True)
        os.rename(old, place)


def _ours(old: Path) -> bool:
    return (
        old.is_dir() and not old.is_symlink() and (old / FILE_NAME).is_file() and not _foreign(old)
    )


def swap(staged: Path, target: Path) -> None:
    """`staged` gets the name `target`. What had it is at `staged` then; OSError where nothing has
    changed."""
    if _exchange(staged, target):
        return
    old = replaced(target)
    aside = staged.with_name(f"{staged.name}.replaced")
    discard(target, aside)
    shutil.rmtree(aside, ignore_errors=True)
    if os.path.lexists(old):
        raise OSError(errno.EEXIST, f"{old.name} beside it is in the way")
    os.rename(target, old)
    try:
        os.rename(staged, target)
    except BaseException:
        os.rename(old, target)
        raise
    os.rename(old, staged)


def _exchange(one: Path, other: Path) -> bool:
    """Two names traded in one step; False where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform.startswith("linux") and hasattr(library, "renameat2"):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        failed = library.renameat2(here, names[0], here, names[1], exchange)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(*names, 2)  # RENAME_SWAP
    else:
        return False
    if failed:
        number = ctypes.get_errno()
        if number not in _CANNOT:
            raise OSError(number, os.strerror(number))
        return False
    return True
