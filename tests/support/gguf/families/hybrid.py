"""Small checkpoints of families whose blocks differ, with unusual settings; see gguf_models."""

import json
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

_STATE = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "conv_kernel": 3,
}  # fmt: skip
_OF_GRANITE = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 3, "attention_multiplier": 0.2,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 1.5,
}  # fmt: skip
# As config.json of released models says it, and llama.cpp's converter asks for.
_RELEASED = {"linear_attention": "mamba", "full_attention": "attention"}
_LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def as_released(folder: Path) -> None:
    """Kinds of blocks under their older names; experts only where a model has some."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = [_RELEASED[kind] for kind in config["layer_types"]]
    if config["model_type"] == "nemotron_h":
        kinds = config.pop("layers_block_type")
        config["hybrid_override_pattern"] = "".join(_LETTERS[kind] for kind in kinds)
        config["num_hidden_layers"] = len(kinds)
        if "moe" not in kinds:
            parts = ("moe", "expert", "n_group", "topk")
            kept = {k: v for k, v in config.items() if not any(part in k for part in parts)}
            config = {**kept, "n_groups": config["n_groups"]}
    path.write_text(json.dumps(config))


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
    "nemotron-h": (
        "NemotronH",
        {**_STATE, "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
         "head_dim": 32, "layer_norm_epsilon": 1e-6},
    ),
    "nemotron-h-moe": (
        "NemotronH",
        {**_STATE, "layers_block_type": ["mamba", "moe", "attention", "moe"], "head_dim": 16,
         "n_routed_experts": 6, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
         "moe_shared_expert_intermediate_size": 48},
    ),
    "nemotron-h-latent": (
        "NemotronH",
        {**_STATE, "layers_block_type": ["moe", "attention", "mamba"], "head_dim": 16,
         "n_routed_experts": 5, "moe_intermediate_size": 32, "num_experts_per_tok": 3,
         "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 40,
         "tie_word_embeddings": True},
    ),
    "granite-4-h": (
        "GraniteMoeHybrid",
        {**_OF_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0,
         "shared_intermediate_size": 96, "mamba_n_groups": 2, "tie_word_embeddings": True},
    ),
    "hrm-text": (
        "HrmText",
        {"head_dim": 32, "H_cycles": 3, "L_cycles": 2, "embedding_scale": 5.0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "bamba": (
        "Bamba",
        {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16,
         "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 3, "hidden_size": 64,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4,
                             "partial_rotary_factor": 0.5}},
    ),
    "granite-4-h-moe": (
        "GraniteMoeHybrid",
        {**_OF_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3,
         "shared_intermediate_size": 80, "mamba_n_groups": 1},
    ),
    "granite-4": (
        "GraniteMoeHybrid",
        {**_OF_GRANITE, "layer_types": ["attention"] * 3, "num_local_experts": 0,
         "num_experts_per_tok": 0, "position_embedding_type": "rope",
         "shared_intermediate_size": 96,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
}  # fmt: skip
# Sizes that K-quants divide, for what llama-quantize makes of each family.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# Keys that no checkpoint says of what they come back as.
SAID_BY_OTHERS = {
    "granite-4": {
        "rope.scaling.finetuned", "attention.head_count_kv", "expert_shared_feed_forward_length",
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank",
        "ssm.inner_size",
    },
    "hunyuan-vl": {
        "context_length", "rope.freq_base", "rope.scaling.alpha",
        "rope.scaling.original_context_length",
    },
    "granite-4-vision": {"deepstack_mapping"},
    "paddleocr-vl": {"vocab_size", "rope.dimension_count"},
    "glm4v": {"attention.key_length", "attention.value_length"},
}  # fmt: skip
# One expert for another, where llama.cpp rounds inputs to float16, stays in a delta net's state
# for the rest of the text: these are compared in float32.
NOT_ROUNDED = ("qwen3.5-moe", "qwen3-next")
# Those that get a block which predicts a further token, as checkpoints in the wild have it.
PREDICTING = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "exaone4.5")


def add_prediction(folder: Path, seed: int) -> None:
    """transformers reads over such blocks and writes none: one like the last block of attention."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    torch.manual_seed(seed + 1)
    seeing = any(".language_model." in name for name in state)
    at = "model.language_model." if seeing else "model."
    blocks = {name.removeprefix(f"{at}layers."): tensor for name, tensor in state.items()}
    last = max(name.partition(".")[0] for name in blocks if ".self_attn." in name)
    for name, tensor in blocks.items():
        if name.startswith(f"{last}."):
            random = torch.randn_like(tensor) * 0.1
            state[f"mtp.layers.0.{name.partition('.')[2]}"] = random
    norm = state[f"{at}norm.weight"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        state[f"mtp.{name}.weight"] = torch.randn_like(norm) * 0.1
    state["mtp.fc.weight"] = torch.randn(len(norm), 2 * len(norm)).to(norm.dtype)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
