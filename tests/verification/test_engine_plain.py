"""What is told without transformers is what transformers says."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig

from qtool import tiny
from qtool.verification.engines import plain

CONFIG = json.loads((Path(tiny.__file__).parent / "config.json").read_text())
KINDS = sorted(plain.TYPES)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_plain_is_read(kind: str, tmp_path: Path) -> None:
    """At the least and the most that each setting may be, too."""
    for key, values in {
        "pretraining_tp": [1, 8], "initializer_range": [0.0, 1.0], "attention_dropout": [0.0, 1.0],
        "eos_token_id": [None, 0], "torch_dtype": ["float16", "float32"], "rope_theta": [1, 1e7],
        "rope_scaling": [None], "tie_word_embeddings": [True, False], "num_hidden_layers": [1, 99],
        "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    }.items():  # fmt: skip
        for value in values:
            config = CONFIG | {"model_type": kind, key: value}
            assert plain.reads(config), (key, value)
            (tmp_path / "config.json").write_text(json.dumps(config))
            AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma3_text"}, {"use_cache": "maybe"}, {"initializer_range": 2.0},
        {"initializer_range": 1},
        {"layer_types": ["full_attention"]}, {"hidden_size": 256.0}, {"num_hidden_layers": 0},
        {"num_attention_heads": 3}, {"head_dim": None}, {"vocab_size": True}, {"text_config": {}},
        {"eos_token_id": -1}, {"rope_scaling": {"rope_type": "yarn"}}, {"dtype": "float8"},
        {"hidden_act": "foo"}, {"architectures": "LlamaForCausalLM"}, {"rope_theta": 0},
    ],
)  # fmt: skip
def test_what_is_not(changes: dict[str, Any]) -> None:
    """transformers is asked, whatever it says."""
    assert plain.reads(CONFIG) and not plain.reads(CONFIG | changes)


def test_what_is_drawn_with(tmp_path: Path) -> None:
    for said in (
        {}, {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": None, "do_sample": True},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "transformers_version": "5.0.0",
         "_from_model_config": True, "do_sample": False},
    ):  # fmt: skip
        assert plain.draws(said)
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
        GenerationConfig.from_pretrained(tmp_path)
    for said in ({"num_return_sequences": 4}, {"eos_token_id": "a"}, {"top_p": "0.9"}):
        assert not plain.draws(said)
