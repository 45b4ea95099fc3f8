"""Files of the shipped model by recipes, each made once for a module of tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

import qtool


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file by a recipe, without importance."""
    folder = tmp_path_factory.mktemp("gguf")

    def get(recipe: str) -> Path:
        path = folder / f"{recipe}.gguf"
        if not path.exists():
            qtool.quantize("tiny", recipe, path, threads=1, changes=["importance=false"])
        return path

    return get
