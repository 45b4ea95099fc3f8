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
    ("nemotron-h", {"hybrid_override_pattern": "M-*M"}, "are not those of 5 blocks"),
    ("nemotron-h", {"hybrid_override_pattern": "M-*XM"}, "are not those of 5 blocks"),
    ("nemotron-h", {"mamba_proj_bias": True}, "mamba_proj_bias is true"),
    ("nemotron-h", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\]"),
    ("nemotron-h", {"time_step_limit": [0.001, None]}, r"time_step_limit is \[0.001"),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, "the activation is 'silu'"),
    ("nemotron-h-moe", {"hybrid_override_pattern": "ME*-"}, "some blocks have an MLP and some"),
    ("nemotron-h-moe", {"n_group": 2}, "n_group is 2, and it chooses among all"),
    ("granite-4-h", {"mamba_n_heads": 4}, "state spaces are 64 wide, and it takes 128"),
    ("granite-4-h", {"position_embedding_type": "rope"}, "is rope, and it knows no positions"),
    ("granite-4-h", {"intermediate_size": 80}, "shared_intermediate_size is 96, and it takes"),
    ("granite-4", {"position_embedding_type": "nope"}, "is nope, and it has rotations"),
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
