"""Models that runs of a module share, and a text."""

from pathlib import Path

import pytest

from support.runs import quantizing


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama/ and moe/, two models, and text.txt."""
    folder = tmp_path_factory.mktemp("root")
    quantizing.build("llama", folder / "llama")
    quantizing.build("qwen3_moe", folder / "moe")
    quantizing.text_file(folder / "text.txt")
    return folder
