"""A row of the table of hostile files, and what its files are made with."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from support.models import hf_arrays
from support.models import small_tokenizers as small

Make = Callable[[Path], list[object]]


@dataclass(frozen=True)
class Row:
    """`make` writes into an empty folder and gives the command line; `says` is a part of the one
    sentence that has to come, as a regular expression."""

    name: str
    make: Make
    says: str
    status: int = 1


@cache
def _honest() -> Path:
    """A Llama of three blocks with a tokenizer, as every command takes it."""
    from support.runs import quantizing

    folder = Path(mkdtemp(prefix="qtool-test-"))
    return quantizing.build("llama", folder / "m")


def honest(folder: Path) -> Path:
    """A copy of it, named m, to tell lies in."""
    return Path(shutil.copytree(_honest(), folder / "m"))


def forget() -> None:
    """Remove what honest() is copied from."""
    if _honest.cache_info().currsize:
        shutil.rmtree(_honest().parent)
        _honest.cache_clear()


def edited(path: Path, change: Mapping[str, Any] | Callable[[dict[str, Any]], None]) -> Path:
    """A JSON file with keys put over, or changed by a function; its folder."""
    content = json.loads(path.read_text()) if path.exists() else {}
    if callable(change):
        change(content)
    else:
        content |= change
    path.write_text(json.dumps(content))
    return path.parent


def tensors(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of a header, which may be bytes."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def gguf_model(
    folder: Path, files: Mapping[str, Any] | None = None, size: int = small.SIZE
) -> Path:
    """The smallest Llama that GGUF recipes take, with these tokenizer files."""
    arrays = hf_arrays.llama()
    words = ("model.embed_tokens.weight", "lm_head.weight")
    arrays |= {name: hf_arrays.numbers(size, 16) for name in words}
    config = {**hf_arrays.LLAMA, "vocab_size": size, "model_type": "llama"}
    hf_arrays.write(folder / "m", config, arrays)
    return small.save(folder / "m", files or {"tokenizer.json": small.bpe()})
