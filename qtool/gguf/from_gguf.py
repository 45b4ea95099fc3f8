"""A GGUF file as something to quantize."""

from functools import partial

from qtool.errors import SourceError
from qtool.formats.gguf_file import SPLIT_KEYS, GgufFile
from qtool.formats.gguf_values import Kind
from qtool.gguf.source import GgufSource, SourceTensor

# They describe the file that was read, not the one to be written.
_OF_THE_FILE = {"general.file_type", *SPLIT_KEYS}


def gguf_source(file: GgufFile) -> GgufSource:
    """The tensors and metadata of a model; `file` stays open until the source is closed."""
    architecture = file.metadata.get("general.architecture")
    kind = file.metadata.get("general.type")
    if kind is not None and kind.value == "imatrix":
        raise SourceError(
            f"{file.path}: an importance matrix, which is given with --imatrix; name a model"
        )
    if architecture is None or architecture.kind is not Kind.STRING:
        raise SourceError(
            f"{file.path}: has no general.architecture, so it is no model that could be quantized"
        )
    tensors = []
    for info in file.tensors.values():
        read = partial(file.read_rows, info.name)
        tensors.append(SourceTensor(info.name, info.shape, info.type, read, fill=read))
    metadata = {key: value for key, value in file.metadata.items() if key not in _OF_THE_FILE}
    return GgufSource(file.path, metadata, tuple(tensors), close=file.close)
