"""GGUF files made into checkpoints in tests."""

from pathlib import Path

import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.gguf_values import Value
from qtool.gguf.from_hf import source as from_hf
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf import files


@pytest.fixture(autouse=True)
def without_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small models have no tokenizer, which has tests of its own."""
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    monkeypatch.setattr(files, "tokenizer_files", lambda _: {})


def source_of(folder: Path) -> GgufSource:
    return hf_source(Checkpoint.open(folder))


def bytes_of(source: GgufSource) -> dict[str, tuple[str, bytes]]:
    return {t.name: (t.type.name, t.read(0, t.rows).tobytes()) for t in source.tensors}


def keys_of(source: GgufSource) -> dict[str, Value]:
    """The metadata of its architecture, by their names without its name."""
    start = f"{source.architecture}."
    return {k.removeprefix(start): v for k, v in source.metadata.items() if k.startswith(start)}
