"""A GGUF model in several files."""

from pathlib import Path

import numpy as np

from qtool.formats.gguf_values import Kind
from support.gguf.gguf_bytes import Gguf, entry, info


def split(folder: Path, count: int = 3, stem: str = "big") -> list[Path]:
    """A model in parts of two tensors each, as gguf-split writes them."""
    files = []
    for number in range(count):
        entries = [
            entry("split.no", Kind.UINT16, number),
            entry("split.count", Kind.UINT16, count),
            entry("split.tensors.count", Kind.INT32, 2 * count),
        ]
        if number == 0:
            entries = [entry("general.architecture", Kind.STRING, "llama"), *entries]
        infos = [info(f"{number}.{i}", [1, 8], offset=32 * i) for i in range(2)]
        data = np.arange(16, dtype=np.float32) + 100 * number
        path = folder / f"{stem}-{number + 1:05}-of-{count:05}.gguf"
        path.write_bytes(bytes(Gguf(entries, infos, data.tobytes())))
        files.append(path)
    return files
