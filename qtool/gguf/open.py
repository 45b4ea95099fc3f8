"""What is quantized into GGUF, from wherever it lies: a GGUF file, or a Hugging Face folder."""

from pathlib import Path

from qtool.errors import SourceError
from qtool.gguf.inspect import gguf_models
from qtool.gguf.source import GgufSource


def is_gguf(path: Path) -> bool:
    """Whether `path` is read as GGUF: such a file, or a folder with some and no checkpoint."""
    return bool(gguf_models(path))


def open_source(path: Path) -> GgufSource:
    """The tensors and metadata of a model; headers only. Close it when nothing is read any more."""
    models = gguf_models(path)
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:3])
        raise SourceError(f"{path}: holds {len(models)} GGUF models ({names}); name the file")
    if models:
        from qtool.formats.gguf_file import GgufFile
        from qtool.gguf.from_gguf import gguf_source

        return gguf_source(GgufFile.open(models[0]))
    from qtool.checkpoint import Checkpoint
    from qtool.gguf.from_hf import hf_source

    return hf_source(Checkpoint.open(path))
