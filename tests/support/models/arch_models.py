"""Small checkpoints with random weights, one per architecture, each with its odd features on.

`build(name, folder)` writes config.json and model.safetensors under the names that checkpoints of
that architecture have in the wild (transformers' own save undoes its fusing of experts).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.models.built_once import built_once

VOCABULARY = 96


def _llama() -> Any:  # grouped queries, a head width that is not width / heads, scaled rope
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        tie_word_embeddings=False,
    )


def _qwen2() -> Any:  # biases on q, k and v only
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def _qwen3() -> Any:  # norms on q and k
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )


def _gemma3() -> Any:  # four norms a block of which the weight is 1 + w, windows shorter than text
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _phi3() -> Any:  # q, k, v in one matrix, gate and up in another
    from transformers import Phi3Config

    return Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=256,
        original_max_position_embeddings=256,
    )


def _opt() -> Any:  # LayerNorm, a bias everywhere, learned positions
    from transformers import OPTConfig

    return OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=128,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )


def _gpt_neox() -> Any:  # attention and MLP side by side, q, k, v interleaved by head
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_parallel_residual=True,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )


def _mixtral() -> Any:  # w1, w2, w3 of each expert in the checkpoint, 3-D in the class
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def _qwen3_moe() -> Any:  # a dense block among the sparse ones
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )


def _stablelm() -> Any:  # LayerNorm with bias, rope on a quarter of each head, one norm for both
    from transformers import StableLmConfig

    return StableLmConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_parallel_residual=True,
        use_qkv_bias=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def _sarvam_moe() -> Any:  # q, k, v in one matrix of the checkpoint, apart in the class; biases
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING["sarvam_moe"](
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        num_experts=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2": _qwen2,
    "stablelm": _stablelm,
    "sarvam_moe": _sarvam_moe,
}
# The eight that the tool promises.
ARCHITECTURES = tuple(CONFIGS)[:8]


@built_once
def build(name: str, folder: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """Write the checkpoint; every norm and bias gets values that differ from channel to channel.

    dtype: of the file; in 16 bits a norm that is folded into has to be rounded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
            else:
                parameter.mul_(4.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if name == "sarvam_moe":  # which is another's class in transformers
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["architectures"] = ["SarvamMoEForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
