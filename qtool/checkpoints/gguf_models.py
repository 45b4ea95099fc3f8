"""Which GGUF models lie at a path, and the files of one: it may come in parts."""

import re
from glob import escape
from pathlib import Path

from qtool.checkpoints.weight_files import MATRIX, is_matrix
from qtool.formats.gguf_cursor import begins_as_gguf
from qtool.formats.gguf_file import first_parts

_PART = re.compile(r"(.*)-\d{5}(-of-\d{5}\.gguf)")


def gguf_models(path: Path) -> list[Path]:
    """The GGUF models that `path` names, split ones by their first part; none where it is
    something else. A folder counts when it holds GGUF files and no other checkpoint."""
    try:
        if path.is_dir():
            names = [entry.name for entry in path.iterdir()]
            if any(name == "config.json" or name.endswith(".safetensors") for name in names):
                return []
            if MATRIX in names and is_matrix(path):
                return []
            return first_parts(path / name for name in sorted(names) if name.endswith(".gguf"))
        if path.suffix == ".gguf":
            return [path]
        return [path] if begins_as_gguf(path) else []
    except OSError:
        return []


def is_gguf(path: Path) -> bool:
    """Whether `path` is read as GGUF: such a file, or a folder with some and no checkpoint."""
    return bool(gguf_models(path))


def source_files(path: Path) -> list[Path]:
    """The files of a model: of a folder, or of a GGUF file, which may come in parts."""
    if path.is_dir():
        return sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    part = _PART.fullmatch(path.name)
    return [path] if part is None else sorted(path.parent.glob(f"{escape(part[1])}-*{part[2]}"))
