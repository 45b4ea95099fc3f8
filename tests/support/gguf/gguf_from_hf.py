"""Conversion of small checkpoints to GGUF in tests: written by qtool, read back as arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind, Value, string, u32
from qtool.gguf.from_hf import source as from_hf
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest


def no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models have no tokenizer; llama.cpp takes such models if the metadata say so."""

    def metadata(folder: Path, arch: str, rows: int, config: object) -> dict[str, Value]:
        return {"tokenizer.ggml.model": string("none"), f"{arch}.vocab_size": u32(rows)}

    monkeypatch.setattr(from_hf, "tokenizer_metadata", metadata)


def write(folder: Path, out: Path, recipe: str) -> GgufFile:
    """`qtool quantize FOLDER --recipe RECIPE -o OUT`."""
    run_gguf(GgufRequest(str(folder), folder, load(recipe), out, 1), Progress(quiet=True))
    return GgufFile.open(out)


def stated(value: Value) -> tuple[Any, ...]:
    """Kind and value, floats as a file stores them."""
    if value.kind is Kind.FLOAT32:
        return value.kind, float(np.float32(value.value))
    if value.kind is Kind.ARRAY:
        return value.kind, value.element, list(value.value)
    return value.kind, value.value


def raw(file: GgufFile, name: str) -> NDArray[np.uint8]:
    info = file.tensors[name]
    rows = int(np.prod(info.shape[:-1], dtype=np.int64))
    return file.read_rows(name, 0, rows)


@pytest.fixture(autouse=True)
def without_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small models have none."""
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_: {})
