"""Symbolic links beside a model's weights: none may bring in a file from elsewhere.

What lies beside the weights (configs, tokenizer, templates, licences) is read and copied into
artifacts, which people publish: a downloaded folder with a link `tokenizer.txt -> ~/.ssh/id_rsa`
must not make a key part of one. A link may lead into the folder itself, or to where the weights
really lie: in a download cache every file is a link to one store.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from os import scandir
from pathlib import Path

from qtool.errors import SourceError

TEMPLATES = "additional_chat_templates"
_MORE = ("*.json", "*.py", "README.md", TEMPLATES)


def check_links(folder: Path, weights: Sequence[Path], patterns: Sequence[str]) -> None:
    """SourceError naming the first link out of the model's own places.

    patterns: names of the files beside the weights that may be copied.
    """
    linked = [
        path
        for path in (*_entries(folder), *_entries(folder / TEMPLATES))
        if path.is_symlink() or path.parent.is_symlink()
    ]
    wanted = [
        path
        for path in linked
        if path.parent.name == TEMPLATES
        or any(fnmatch(path.name, pattern) for pattern in (*patterns, *_MORE))
    ]
    if not wanted:
        return
    stores = {_resolved(file).parent for file in weights}
    stores |= {place / TEMPLATES for place in stores}  # and nothing else that lies below
    for path in wanted:
        found = _resolved(path)
        inside = found.is_relative_to(folder.resolve()) or found.parent in stores
        if path.exists() and not inside:
            raise SourceError(
                f"{path}: a link to {found}, where no other part of this model lies; its content "
                "would get into what is made of the model: copy the file if it belongs there, or "
                "remove the link"
            )


def _resolved(path: Path) -> Path:
    """Where a link leads; SourceError where that is to itself."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a RuntimeError until Python 3.13
        raise SourceError(
            f"{path}: a link that leads back to itself; remove it, or put the file in its place"
        ) from None


def _entries(folder: Path) -> list[Path]:
    try:
        with scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries)
    except OSError:  # it is not there, or what is read of it will say why
        return []
