"""Small checkpoints of the newest decoders; rows as in `gguf_models`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo-v2": (
        "MiMoV2Flash",
        {"num_hidden_layers": 4, "n_routed_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "head_dim": 32, "v_head_dim": 24, "sliding_window": 8,
         "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
         "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "n_group": 3, "topk_group": 2,
         "attention_value_scale": 0.6, "rms_norm_eps": 1e-6,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 3e4,
                                "partial_rotary_factor": 0.334},
             "sliding_attention": {"rope_type": "default", "rope_theta": 2e3,
                                   "partial_rotary_factor": 0.334}}},
    ),
    "qwen4-exp": (
        "Qwen4ExpText",
        {"num_hidden_layers": 3, "head_dim": 32, "linear_conv_kernel_dim": 3,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
         "linear_num_value_heads": 6, "num_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "hc_count": 3,
         "hc_lowrank": 24, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 24,
         "ple_layer_ids": [1], "ple_conv_kernel_size": 3, "ngram_size": 3, "heads_per_ngram": 2,
         "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 30,
         "split_ngram_parts": 4,
         "indexer_budget": 8, "indexer_compress_ratio": 1, "output_gate_type": "sigmoid",
         "layer_types": ["linear_attention", "full_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 2e5,
                             "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}},
    ),
    "laguna": (
        "Laguna",
        {"num_hidden_layers": 4, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "sliding_window": 8,
         "num_attention_heads_per_layer": [4, 6, 2, 4], "moe_routed_scaling_factor": 1.5,
         "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
         "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 3e4, "factor": 4.0,
                                "original_max_position_embeddings": 16,
                                "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 2e3,
                                   "partial_rotary_factor": 0.75}}},
    ),
    "laguna-full": (
        "Laguna",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
         "shared_expert_intermediate_size": 32, "gating": "per-element", "sliding_window": 0,
         "tie_word_embeddings": True},
    ),
    "kimi-linear": (
        "KimiLinear",
        {"num_key_value_heads": 4, "num_hidden_layers": 3, "num_local_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "n_group": 3, "topk_group": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 20,
         "qk_rope_head_dim": 8, "v_head_dim": 12, "linear_head_dim": 24, "linear_num_heads": 4,
         "linear_conv_kernel_dim": 3, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-6,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "hy-v4": (
        "HYV4",
        {"num_hidden_layers": 3, "n_routed_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "n_shared_experts": 2, "n_group": 3, "topk_group": 2,
         "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8,
         "v_head_dim": 12, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-6, "hc_mult": 3,
         "hc_magnitude": 1.5, "hc_eps": 1e-3, "swiglu_limit": 0.3, "index_topk": 8,
         "index_head_dim": 24, "index_n_heads": 16,
         "indexer_types": ["full", "shared", "full"]},
    ),
    "dots3-note": (
        "Dots3NoteText",
        {"num_key_value_heads": 4, "num_hidden_layers": 4, "n_routed_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "shared_experts_intermediate_size": 32, "kv_lora_rank": 24, "q_lora_rank": 32,
         "qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 28,
         "routed_scaling_factor": 1.5, "sliding_window": 8, "index_topk": 8,
         "index_head_dim": 64, "index_n_heads": 16, "rope_theta": 3e4, "swa_rope_theta": 2e3,
         "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
         "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 32,
         "swa_kv_lora_rank": 40, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16,
         "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 20},
    ),
    "glm-5.3": (
        "Glm5Next",
        {"num_key_value_heads": 4, "num_hidden_layers": 3, "n_routed_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "n_group": 3, "topk_group": 2, "kv_lora_rank": 24, "q_lora_rank": 32,
         "qk_nope_head_dim": 20, "v_head_dim": 12, "linear_head_dim": 24, "linear_num_heads": 4,
         "linear_conv_kernel_dim": 3, "linear_lower_bound": -4.0, "routed_scaling_factor": 1.5,
         "rms_norm_eps": 1e-6, "hc_eps": 1e-3, "hc_sinkhorn_iters": 3, "swiglu_limit": 0.25,
         "index_topk": 8, "index_head_dim": 64, "index_n_heads": 16, "index_kpool": 4,
         "mlp_layer_types": ["dense", "sparse", "sparse"],
         "indexer_types": ["full", "full", "shared"],
         "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"]},
    ),
    "step-3.7": (
        "Step3p7",
        {"num_hidden_layers": 4, "head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "share_expert_dim": 48, "sliding_window": 8,
         "num_sliding_attention_heads": 6, "moe_router_scaling_factor": 1.5,
         "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
         "moe_layers_enum": "1,2,3", "swiglu_limits": [0.0, 0.3, 0.0, 0.2],
         "swiglu_limits_shared": [0.0, 0.0, 0.25, 0.15],
         "rope_theta": [3e4, 2e3, 2e3, 3e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
         "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "minimax-m3": (
        "MiniMaxM3VL",
        {"num_hidden_layers": 3, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3,
         "dense_intermediate_size": 80, "shared_intermediate_size": 96, "rotary_dim": 16,
         "routed_scaling_factor": 1.5, "index_n_heads": 2, "index_head_dim": 24,
         "index_block_size": 4, "index_topk_blocks": 3,
         "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2],
         "mlp_layer_types": ["dense", "sparse", "sparse"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4,
                             "partial_rotary_factor": 0.5}},
    ),
}  # fmt: skip
# What lies around the settings of the text, as in `dense`.
SEEING: dict[str, dict[str, Any]] = {
    "MiniMaxM3VL": {
        "text_config": {}, "projector_hidden_size": 32,
        "vision_config": {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 48,
                          "num_attention_heads": 2, "patch_size": 4, "image_size": 16},
    },
    "Step3p7": {
        "text_config": {},
        "vision_config": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48,
                          "num_attention_heads": 2, "patch_size": 4, "image_size": 16},
    },
    "Glm5Next": {
        "text_config": {},
        "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                          "patch_size": 4, "image_size": 16, "out_hidden_size": 64,
                          "projection_intermediate_size": 48, "spatial_merge_size": 2},
    },
}  # fmt: skip
MULTIPLIED = ("dots3-note",)  # norms, by what llama.cpp has no number for
# As in `recent`: one token or expert for another, where inputs are rounded.
NOT_ROUNDED = ("qwen4-exp", "hy-v4", "dots3-note", "glm-5.3")
SAID_BEYOND: dict[str, set[str]] = {
    "laguna": {"laguna.attention.sliding_window_pattern"},
    "kimi-linear": {"kimi-linear.expert_group_count"},
}


def finish(name: str, folder: Path) -> None:
    """Settings as released models say them, which llama.cpp's converter asks for."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if name == "mimo-v2":
        for setting in ("num_attention_heads", "head_dim", "v_head_dim"):
            config[f"swa_{setting}"] = config[setting]
        config |= {
            "hybrid_layer_pattern": [int(k == "sliding_attention") for k in config["layer_types"]],
            "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
            "topk_method": "noaux_tc",
            "layernorm_epsilon": config["rms_norm_eps"],
        }
    if name == "qwen4-exp":
        kinds = {"indexed_attention": "full_attention"}
        config["layer_types"] = [kinds.get(kind, kind) for kind in config["layer_types"]]
    if name == "kimi-linear":
        full = [b + 1 for b, k in enumerate(config["layer_types"]) if k == "full_attention"]
        config |= {
            "first_k_dense_replace": 1,
            "moe_router_activation_func": "sigmoid",
            "rope_theta": 10000.0,
            "linear_attn_config": {
                "head_dim": config["linear_head_dim"],
                "num_heads": config["linear_num_heads"],
                "short_conv_kernel_size": config["linear_conv_kernel_dim"],
                "full_attn_layers": full,
            },
        }
        renamed(folder, lambda key: key.replace(".0.block_sparse_moe.", ".0.mlp."))
    if name == "hy-v4":
        renamed(folder, _released_hunyuan)
    if name == "dots3-note":
        own = config.pop("per_layer_config")["1"]
        ropes = config.pop("rope_parameters")
        config |= {f"swa_{setting}": value for setting, value in own.items()}
        config |= {
            "layer_types": [k.replace("indexed", "full") for k in config["layer_types"]],
            "swa_q_lora_rank": config["q_lora_rank"],
            "swa_qk_rope_head_dim": config["qk_rope_head_dim"],
            "sliding_window_size": config.pop("sliding_window"),
            "moe_shared_expert_intermediate_size": config.pop("shared_experts_intermediate_size"),
            "first_k_dense_replace": 1,
            "rope_theta": ropes["indexed_attention"]["rope_theta"],
            "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
            "apply_mla_qkv_lora_rescale": True,
            "scoring_func": "sigmoid",
        }
    if name == "glm-5.3":
        config |= {"hidden_size": 64, "mhc": True, "mla_use_nope": True}
        text = config["text_config"]
        text |= {
            "first_k_dense_replace": 1, "mla_use_nope": True, "scoring_func": "sigmoid",
            "layer_types": [k.replace("indexed", "full") for k in text["layer_types"]],
            "linear_attn_config": {
                "num_heads": text["linear_num_heads"], "head_dim": text["linear_head_dim"],
                "short_conv_kernel_size": text["linear_conv_kernel_dim"],
                "gate_lower_bound": text["linear_lower_bound"],
            },
        }  # fmt: skip
    if name == "step-3.7":
        text = config["text_config"]
        text.pop("per_layer_config")
        rope, mlps = text.pop("rope_parameters"), text.pop("mlp_layer_types")
        each = [rope[kind] for kind in text["layer_types"]]
        scaling = {k: v for k, v in rope["full_attention"].items() if k != "rope_theta"}
        scaling.pop("partial_rotary_factor")
        text |= {
            "num_attention_groups": text["num_key_value_heads"],
            "moe_num_experts": text.pop("n_routed_experts"),
            "moe_top_k": text.pop("num_experts_per_tok"),
            "moe_layers_enum": ",".join(str(b) for b, k in enumerate(mlps) if k == "sparse"),
            "attention_other_setting": {
                "num_attention_heads": text.pop("num_sliding_attention_heads"),
                "num_attention_groups": text["num_key_value_heads"],
            },
            "rope_theta": [one["rope_theta"] for one in each],
            "partial_rotary_factors": [one["partial_rotary_factor"] for one in each],
            "rope_scaling": scaling,
            "norm_expert_weight": True,
            "moe_router_activation": "sigmoid",
        }
    if name == "minimax-m3":
        text = config["text_config"]
        text |= {
            "n_shared_experts": 1, "scoring_func": "sigmoid",
            "moe_layer_freq": [int(k == "sparse") for k in text["mlp_layer_types"]],
            "sparse_attention_config": {
                "sparse_num_index_heads": text["index_n_heads"],
                "sparse_index_dim": text["index_head_dim"],
                "sparse_block_size": text["index_block_size"],
                "sparse_topk_blocks": text["index_topk_blocks"],
                "sparse_local_block": text["index_local_blocks"],
            },
        }  # fmt: skip
    path.write_text(json.dumps(config))


def fill(model: Any) -> None:
    """Values for what gguf_models leaves at zero."""
    for name, parameter in model.named_parameters():
        if "index_kpool_compress" in name or name.endswith("ple.conv1d.weight"):
            parameter.normal_(std=0.3)


def _released_hunyuan(key: str) -> str:
    key = re.sub(r"hc_pre\.(hc_(?:attn|mlp)_layer)", r"\1.hc_pre", key)
    key = key.replace("model.hc_pre.", "model.")
    return re.sub(r"(mlp\.(?:shared_experts\.)?)linear_gate", r"\1gate_proj", key)


def renamed(folder: Path, new: Callable[[str], str]) -> None:
    """Tensors under other names."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    state = {new(key): value for key, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


# Of which llama.cpp sees all tokens where flash attention is off.
CHOSEN_WITH_FLASH = ("minimax-m3",)
