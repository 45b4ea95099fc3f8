"""Stored tensors as they are: name, dtype, shape, bytes. Any dtype, and any lie.

with edited(folder) as tensors: ...     all tensors of a folder, whatever file they lie in
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMPY = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1"}


@dataclass
class Raw:
    """A stored tensor; `file` is where it lies."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    file: str = "model.safetensors"

    @property
    def array(self) -> NDArray[Any]:
        """A copy as numpy has it; dtypes unknown to numpy as unsigned integers."""
        width = len(self.data) // max(1, int(np.prod(self.shape)))
        return np.frombuffer(self.data, _NUMPY.get(self.dtype, f"<u{width}")).reshape(self.shape)

    def changed(self, array: NDArray[Any]) -> "Raw":
        """The same tensor with other numbers."""
        return Raw(self.dtype, array.shape, np.ascontiguousarray(array).tobytes(), self.file)


def read(path: Path) -> dict[str, Raw]:
    """The tensors of one safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, info in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = info["data_offsets"]
            data = content[start + first : start + last]
            found[name] = Raw(info["dtype"], tuple(info["shape"]), data, path.name)
    return found


def write(path: Path, tensors: dict[str, Raw]) -> None:
    """A safetensors file of these."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, raw in tensors.items():
        end = at + len(raw.data)
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(r.data for r in tensors.values())
    )


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, Raw]]:
    """Every tensor of a folder, to be changed; files and the index are written anew."""
    tensors: dict[str, Raw] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= read(path)
    yield tensors
    files = {raw.file for raw in tensors.values()}
    for path in folder.glob("*.safetensors"):
        if path.name not in files:
            path.unlink()
    for file in files:
        write(folder / file, {n: raw for n, raw in tensors.items() if raw.file == file})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {name: raw.file for name, raw in tensors.items()}
        index.write_text(json.dumps(content))


@contextmanager
def settings(path: Path) -> Iterator[dict[str, Any]]:
    """A JSON file, to be changed."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


@contextmanager
def quantization(folder: Path) -> Iterator[dict[str, Any]]:
    """quantization_config of config.json, to be changed; a file beside it that repeats it goes."""
    for beside in ("quantize_config.json", "quant_config.json"):
        (folder / beside).unlink(missing_ok=True)
    with settings(folder / "config.json") as config:
        yield config["quantization_config"]
