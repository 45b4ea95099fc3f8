"""Small decoders of classes of transformers, and their logits."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
)

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers

TOKENS = np.random.default_rng(0).integers(3, 90, (3, 24), dtype=np.int64)
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MAMBA = {
    "mamba_d_state": 16, "mamba_d_head": 32, "mamba_n_heads": 4, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
CAUSAL: dict[str, dict[str, Any]] = {
    # The model's class, and not the block's, fills a buffer that no checkpoint holds.
    "falcon_h1": {**SMALL, **MAMBA, "mamba_d_ssm": 128, "key_multiplier": 0.5,
                  "ssm_multipliers": [0.5, 2.0, 1.0, 0.25, 1.0]},
    # Its loop takes a pair from each block, of which the second is of no use.
    "bamba": {**SMALL, **MAMBA, "attn_layer_indices": [1]},
}  # fmt: skip


def built(name: str, folder: Path, family: Any = AutoModelForCausalLM, **keys: Any) -> Any:
    torch.manual_seed(0)
    model = family.from_config(CONFIG_MAPPING[name](**keys), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model.eval()


def check_logits(folder: Path, model: Any) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folder))
    with Workers(2) as workers:
        found = skeleton.logits(TOKENS, workers)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert float(expected.std()) > 0.01
