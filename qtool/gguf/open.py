"""What is quantized into GGUF, from wherever it lies: a GGUF file, or a Hugging Face folder."""

from pathlib import Path

from qtool.errors import SourceError
from qtool.gguf.source import GgufSource


def is_gguf(path: Path) -> bool:
    """Whether `path` is read as GGUF: a .gguf file, or a folder with such files and no config."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf"


def open_source(path: Path) -> GgufSource:
    """The tensors and metadata of a model; headers only."""
    if is_gguf(path):
        from qtool.formats.gguf_file import GgufFile
        from qtool.gguf.from_gguf import gguf_source

        return gguf_source(GgufFile.open(_file_of(path)))
    from qtool.checkpoint import Checkpoint
    from qtool.gguf.from_hf import hf_source

    return hf_source(Checkpoint.open(path))


def _file_of(path: Path) -> Path:
    """The file itself, or the one model of a folder, of which all parts but the first are left."""
    if not path.is_dir():
        return path
    found = [file for file in sorted(path.glob("*.gguf")) if not _later_part(file)]
    if len(found) != 1:
        names = ", ".join(file.name for file in found[:3]) or "no first part"
        raise SourceError(f"{path}: holds {len(found)} GGUF models ({names}); name the file")
    return found[0]


def _later_part(file: Path) -> bool:
    """Whether the name is NAME-0000N-of-0000M.gguf with N above 1."""
    parts = file.stem.rsplit("-", 3)
    return (
        len(parts) == 4
        and parts[2] == "of"
        and all(p.isdecimal() and len(p) == 5 for p in (parts[1], parts[3]))
        and int(parts[1]) > 1
    )
