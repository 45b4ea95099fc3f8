"""The cache that huggingface_hub keeps, read as folders.

models--OWNER--NAME/refs/REVISION             the commit that a branch or tag last meant
models--OWNER--NAME/snapshots/COMMIT/FILE     a link into blobs/
models--OWNER--NAME/blobs/DIGEST              sha256 of files in LFS, git's sha1 of the others
"""

import re
from pathlib import Path

from qtool.errors import SourceError

_FOLDER = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


def newest_snapshot(path: Path) -> Path:
    """`path` itself; of a repository's folder in the cache, the snapshot that is meant by it.

    That is the one which the branch main last meant, or the only one. SourceError where several
    are there and none is main.
    """
    if _FOLDER.fullmatch(path.name) is None or not (path / "snapshots").is_dir():
        return path
    main = path / "refs" / "main"
    if main.is_file():
        commit = main.read_text(encoding="utf-8", errors="replace").strip()
        if _COMMIT.fullmatch(commit) and (path / "snapshots" / commit).is_dir():
            return path / "snapshots" / commit
    found = sorted(one for one in (path / "snapshots").iterdir() if one.is_dir())
    if len(found) == 1:
        return found[0]
    if not found:
        raise SourceError(f"{path}: the cache has no snapshot in it; download it again")
    names = ", ".join(one.name for one in found[:3])
    raise SourceError(f"{path}: holds {len(found)} snapshots ({names}); name one of them")


def repository_of(path: Path) -> tuple[str, str | None] | None:
    """The repository and the commit that a folder or file of the cache belongs to, or None."""
    for folder in (path, *path.parents):
        found = _FOLDER.fullmatch(folder.name)
        if found is None or not (folder / "snapshots").is_dir():
            continue
        below = path.relative_to(folder).parts
        commit = below[1] if len(below) > 1 and below[0] == "snapshots" else None
        if commit is not None and _COMMIT.fullmatch(commit) is None:
            commit = None
        return f"{found[1]}/{found[2]}", commit
    return None
