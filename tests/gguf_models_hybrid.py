"""Small checkpoints of families whose blocks differ, with unusual settings; see gguf_models."""

from pathlib import Path
from typing import Any

_DELTA = {
    "head_dim": 32, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
_ROTATED = {"rope_type": "default", "rope_theta": 2e5, "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2]}  # fmt: skip
_KINDS = ["linear_attention", "full_attention"]

# name -> (class of the configuration, its settings beside the small ones)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", {**_DELTA, "num_hidden_layers": 4, "rope_parameters": _ROTATED}),
    "qwen3.5-kinds": (
        "Qwen3_5Text",
        {
            **_DELTA,
            "num_hidden_layers": 3,
            "layer_types": [*_KINDS, "linear_attention"],
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**_DELTA, **_EXPERTS, "num_hidden_layers": 4}),
    "qwen3-next": (
        "Qwen3Next",
        {
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 2,
            "layer_types": _KINDS,
            "linear_num_value_heads": 4,
        },
    ),
    "lfm2": (
        "Lfm2",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
         "conv_L_cache": 4, "block_multiple_of": 16, "block_ffn_dim_multiplier": 0.9,
         "norm_eps": 1e-6},
    ),
    "lfm2-plain": (
        "Lfm2",
        {"full_attn_idxs": [0], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
         "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 48},
    ),
}  # fmt: skip
# Sizes that K-quants divide, for what llama-quantize makes of each family.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
WIDER: dict[str, dict[str, Any]] = {
    name: {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
           "linear_num_value_heads": 4, "moe_intermediate_size": 256,
           "shared_expert_intermediate_size": 256}
    for name in ("qwen3.5", "qwen3.5-moe", "qwen3-next")
}  # fmt: skip
# What is said of a file of theirs that is to be a checkpoint again.
NO_WAY_BACK = {"qwen3-next": "mixed in one matrix, which cannot be put together again"}
# One expert for another, where llama.cpp rounds inputs to float16, stays in a delta net's state
# for the rest of the text: these are compared in float32.
NOT_ROUNDED = ("qwen3.5-moe", "qwen3-next")
# Those that get a block which predicts a further token, as checkpoints in the wild have it.
PREDICTING = ("qwen3.5", "qwen3.5-moe", "qwen3-next")


def add_prediction(folder: Path, seed: int) -> None:
    """transformers reads over such blocks and writes none: one like the last block of attention."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    torch.manual_seed(seed + 1)
    last = max(name.split(".")[2] for name in state if ".self_attn." in name)
    like = {name: tensor for name, tensor in state.items() if f".layers.{last}." in name}
    for name, tensor in like.items():
        random = torch.randn_like(tensor) * 0.1
        state[f"mtp.layers.0.{name.split('.', 3)[3]}"] = random
    norm = state["model.norm.weight"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        state[f"mtp.{name}.weight"] = torch.randn_like(norm) * 0.1
    state["mtp.fc.weight"] = torch.randn(len(norm), 2 * len(norm)).to(norm.dtype)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
