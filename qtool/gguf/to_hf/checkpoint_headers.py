"""The checkpoint that a GGUF file becomes before a recipe for safetensors, for plans."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from qtool.errors import QtoolError
from qtool.gguf.open import open_source
from qtool.gguf.to_hf.files import in_one_file, quantized_again, side_files
from qtool.gguf.to_hf.model import hf_model


@contextmanager
def checkpoint_headers(path: Path, *, requantize: bool) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A folder with all files of the checkpoint that a GGUF file becomes, and what is to be said
    of it; of the tensors it has the header, and a hole where numbers will be.

    UnsupportedError where the file is quantized, unless `requantize`. Errors name the file.
    """
    source = open_source(path)
    again = quantized_again(source, requantize)
    model = hf_model(source, None)
    layout = in_one_file(model)
    said = [] if again is None else [again]
    said.append(
        f"note: a checkpoint of {layout.size:,} bytes is made of {path.name} first, beside the "
        "output, and removed in the end"
    )
    with TemporaryDirectory(prefix="qtool-") as folder:
        for name, content in side_files(source, model).items():
            Path(folder, name).write_bytes(content)
        for file in layout.files:
            with Path(folder, file.name).open("wb") as hollow:
                hollow.write(file.header)
                hollow.truncate(file.size)
        try:
            yield Path(folder), tuple(said)
        except QtoolError as error:
            raise type(error)(str(error).replace(folder, str(path))) from None
