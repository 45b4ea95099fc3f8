"""What llama.cpp computes otherwise than a checkpoint asks for, by the small model's name."""

from pathlib import Path
from typing import Any

import gguf_models
import pytest

from qtool.checkpoint import Checkpoint
from qtool.errors import QtoolError
from qtool.gguf import from_hf
from qtool.gguf.from_hf import hf_source

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("hunyuan-moe", {"moe_topk": [3, 2]}, "moe_topk differs from block to block"),
    ("hunyuan-moe", {"moe_topk": [3]}, "moe_topk is a list of 1 numbers"),
    ("hunyuan-moe", {"moe_intermediate_size": 48}, "experts are 48 wide, and it takes inter"),
    ("hunyuan-moe", {"attention_bias": True}, "attention_bias is true"),
]


@pytest.fixture(autouse=True)
def without_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_: {})


@pytest.mark.parametrize(("name", "change", "said"), REFUSED)
def test_refused(name: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = gguf_models.build(name, tmp_path / "model")
    gguf_models.rewrite_config(folder, lambda config: config.update(change))
    with pytest.raises(QtoolError, match=said):
        hf_source(Checkpoint.open(folder))
