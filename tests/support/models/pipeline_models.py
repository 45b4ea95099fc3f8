"""Checkpoints by architecture, and a small calibration."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from support.models import arch_models
from support.runs import quantizing


@dataclass(frozen=True)
class Models:
    """Checkpoints by architecture, built when first asked for, and one calibration text."""

    root: Path
    text: Path

    def __call__(self, name: str, dtype: str = "float32") -> Path:
        folder = self.root / dtype / name
        if not folder.exists():
            quantizing.add_tokenizer(arch_models.build(name, folder, dtype=dtype))
        return folder

    def settings(self, group: int = 32, samples: int = 6) -> list[str]:
        """A small calibration and search, and groups that small matrices divide into."""
        return [
            f"weights.group_size={group}",
            f"calibration.source={self.text}",
            f"calibration.samples={samples}",
            "calibration.length=64",
            "awq.grid=4",
        ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(root, quantizing.text_file(root / "text.txt"))
