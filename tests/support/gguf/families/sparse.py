"""Small checkpoints of decoders with experts: rows of gguf_models.MODELS, and what only they need.

Sizes and settings are unusual, so that one that is ignored shows.
"""

import json
from pathlib import Path
from typing import Any

from support.gguf.families.recent import (
    LATENT,
    RECENT,
    RECENT_AHEAD,
    RECENT_SAID_BEYOND,
    ROUTED,
    USUAL_YARN,
    YARN,
)

SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4-moe": (
        "Glm4Moe",
        {**ROUTED, "head_dim": 32, "use_qk_norm": True, "routed_scaling_factor": 1.5,
         "first_k_dense_replace": 2, "attention_bias": True, "num_nextn_predict_layers": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4,
                             "partial_rotary_factor": 0.25}},
    ),
    "glm4-moe-plain": (
        "Glm4Moe",
        {**ROUTED, "norm_topk_prob": False, "n_shared_experts": 2, "n_group": 3, "topk_group": 2,
         "head_dim": 16, "num_nextn_predict_layers": 1},
    ),
    "solar-open": (
        "SolarOpen",
        {**ROUTED, "head_dim": 32, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
         "n_group": 3, "topk_group": 2, "attention_bias": True, "first_k_dense_replace": 0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4,
                             "partial_rotary_factor": 1.0}},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    ),
    "dots1": (
        "Dots1",
        {**ROUTED, "n_shared_experts": 2, "num_key_value_heads": 4, "first_k_dense_replace": 1,
         "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    ),
    "dots1-plain": (
        "Dots1",
        {**ROUTED, "n_shared_experts": 1, "num_key_value_heads": 4, "head_dim": 32,
         "norm_topk_prob": False},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "olmoe-tied": (
        "Olmoe",
        {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 4,
         "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "num_hidden_layers": 3,
         "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "ernie4.5-moe-plain": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 32, "num_hidden_layers": 4,
         "moe_num_shared_experts": 0, "moe_layer_start_index": 2,
         "tie_word_embeddings": False},
    ),
    "granite-moe": (
        "GraniteMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "attention_multiplier": 0.2,
         "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 1.5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 80,
         "attention_multiplier": 0.25, "logits_scaling": 1.5},
    ),
    "mellum": (
        "Mellum",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32,
         "num_hidden_layers": 4, "sliding_window": 8,
         "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
         "rope_parameters": {
             "full_attention": USUAL_YARN,
             "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}},
    ),
    "cohere2-moe": (
        "Cohere2Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "num_hidden_layers": 6,
         "sliding_window": 8, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80,
         "num_shared_experts": 2, "expert_selection_fn": "sigmoid", "logit_scale": 0.25},
    ),
    "cohere2-moe-softmax": (
        "Cohere2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 4,
         "sliding_window": 8, "tie_word_embeddings": False, "layer_norm_eps": 1e-6,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "granite-moe-tied": (
        "GraniteMoe",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True,
         "attention_bias": True, "attention_multiplier": 0.25},
    ),
    "dbrx": (
        "Dbrx",
        {"d_model": 64, "max_seq_len": 96,
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 3e4},
         "ffn_config": {"moe_num_experts": 5, "moe_top_k": 3, "ffn_hidden_size": 80},
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "llama4": (
        "Llama4Text",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 80,
         "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "head_dim": 32,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "llama4-maverick": (
        "Llama4Text",
        {"num_local_experts": 128, "num_experts_per_tok": 1, "intermediate_size": 32,
         "intermediate_size_mlp": 80, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
         "head_dim": 32, "use_qk_norm": False,
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 3e4, "factor": 16.0,
                             "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                             "original_max_position_embeddings": 128}},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 8,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0,
                             "original_max_position_embeddings": 64}},
    ),
    "gpt-oss-full": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    ),
    "gpt-oss-mxfp4": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
         "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": 40, "first_k_dense_replace": 1, "n_shared_experts": 2,
         "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 1, "num_experts_per_tok": 3,
         "rope_parameters": {**USUAL_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 32, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
         "num_nextn_predict_layers": 1, "tie_word_embeddings": True,
         "rope_parameters": {**USUAL_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v3-plain": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1,
         "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    **RECENT,
}  # fmt: skip
SAID_BEYOND = {
    **RECENT_SAID_BEYOND,
    # llama.cpp stops without it. Released checkpoints say scoring_func, transformers does not.
    "minimax-m2": {"minimax-m2.expert_gating_func"},
    "dots1": {"dots1.expert_gating_func"},
    "dots1-plain": {"dots1.expert_gating_func"},
    "gpt-oss-full": {"gpt-oss.attention.sliding_window_pattern"},
    "deepseek-v2": {"deepseek2.expert_gating_func"},
    # llama.cpp asks for the rank of queries, too, unless there are 26 or 27 blocks.
    "deepseek-v2-lite": {"deepseek2.expert_gating_func", "deepseek2.attention.q_lora_rank"},
    "deepseek-v3": {"deepseek2.expert_gating_func"},
    "deepseek-v3-plain": {"deepseek2.expert_gating_func", "deepseek2.attention.q_lora_rank"},
}
NO_WAY_BACK = {
    "apertus": "what activations learned in tensors, .* cannot be turned back",
    "step-3.7": "beside a vision tower, without which transformers has no class",
    "glm-5.3": "beside a vision tower, without which transformers has no class",
    **dict.fromkeys(
        ("muse-glimmer", "chameleon", "chameleon-heads"), "no class for the decoder alone"
    ),
}
# It writes no head, and llama.cpp does not load such a file. Chameleon: it takes the norm of the
# first head for all, and fails where there are fewer heads of keys.
FAILS_THERE = ("olmoe-tied", "chameleon-heads")
PACKED = ("gpt-oss-mxfp4",)  # experts in MXFP4
TURNED = ("qwen3-vl-moe",)  # experts as they were released
# With the block that predicts a further token.
_AHEAD = {"glm4-moe", "deepseek-v3", "glm-ocr", *RECENT_AHEAD}


def fill(model: Any) -> None:
    """Values for what gguf_models leaves at zero: biases of experts, and of their choice."""
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.uniform_(-0.3, 0.3)
    for name, parameter in model.named_parameters():
        if name.endswith("router.gate.weight"):  # AFMoE begins with zeros
            parameter.normal_(std=0.1)
        if name.endswith("_proj_bias"):  # of experts, in rows
            parameter.uniform_(-0.3, 0.3)


def finish(name: str, folder: Path) -> None:
    """Write what save_pretrained does not: the block that predicts a further token, MXFP4, and
    experts that are transposed."""
    if name in PACKED:
        _pack_experts(folder)
    if name in TURNED:
        turn_experts(folder)
    if name not in _AHEAD:
        return
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    sees = any(key.startswith("model.language_model.") for key in state)
    at = "model.language_model." if sees else "model."
    embedding = state[f"{at}embed_tokens.weight"]
    numbered = [key.removeprefix(f"{at}layers.") for key in state if key.startswith(f"{at}layers.")]
    blocks = 1 + max(int(key.partition(".")[0]) for key in numbered)
    last, ahead = f"{at}layers.{blocks - 1}.", f"{at}layers.{blocks}."
    state |= {ahead + k.removeprefix(last): -v for k, v in state.items() if k.startswith(last)}
    width = embedding.shape[1]
    state[ahead + "embed_tokens.weight"] = embedding.clone()
    state[ahead + "shared_head.head.weight"] = -embedding
    state[ahead + "eh_proj.weight"] = torch.randn(width, 2 * width).to(embedding.dtype)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        state[f"{ahead}{norm}.weight"] = torch.rand(width).to(embedding.dtype)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def turn_experts(folder: Path) -> None:
    """Transpose fused experts, which transformers saves as it has them in memory."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        state[name] = state[name].transpose(1, 2).contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def _pack_experts(folder: Path) -> None:
    """Random codes in place of experts, as gpt-oss is released."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        experts, columns, rows = state.pop(name).shape
        shape = (experts, rows, columns // 32)
        state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(120, 124, shape, dtype=torch.uint8)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))


def unpacked(folder: Path) -> Path:
    """The same model with plain experts, which transformers runs everywhere."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    for name in [name for name in state if name.endswith("_blocks")]:
        codes, stem = state.pop(name), name.removesuffix("_blocks")
        scales = torch.exp2(state.pop(f"{stem}_scales").float() - 127)
        numbers = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1)
        rows = numbers.flatten(-2) * scales[..., None]
        state[stem] = rows.flatten(-2).transpose(1, 2).contiguous()
    plain = folder.with_name(f"{folder.name}-plain")
    plain.mkdir()
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    return plain
