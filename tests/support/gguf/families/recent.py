"""Small checkpoints of decoders with experts of the last years; rows as in `gguf_models`."""

from typing import Any

ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "num_hidden_layers": 3}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0,
    "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip
USUAL_YARN = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
LATENT = {**ROUTED, **_LATENT}
# Many heads: of a few, scores are zero at the same time, and the choice among zeros is chance.
_INDEXED = {**LATENT, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 8}
RECENT: dict[str, tuple[str, dict[str, Any]]] = {
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"num_experts": 5, "moe_topk": [3, 3], "num_shared_expert": [1, 1], "head_dim": 32,
         "moe_intermediate_size": [96, 96]},
    ),
    "hunyuan-moe-alpha": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": [2, 2], "num_shared_expert": [1, 1], "hidden_size": 256,
         "num_attention_heads": 2, "head_dim": 128, "moe_intermediate_size": [96, 96],
         "tie_word_embeddings": True, "max_position_embeddings": 32768,
         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0,
                             "alpha": 1000.0}},
    ),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
         "mlp_layer_types": ["dense", "sparse", "sparse"], "num_nextn_predict_layers": 1},
    ),
    "afmoe": (
        "Afmoe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32,
         "num_hidden_layers": 5, "num_dense_layers": 2, "sliding_window": 8, "mup_enabled": True,
         "route_scale": 1.5},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32,
         "num_hidden_layers": 5, "first_k_dense_replace": 2, "sliding_window": 8,
         "num_shared_experts": 2},
    ),
    "hy-v3": (
        "HYV3",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32,
         "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
         "first_k_dense_replace": 1, "num_shared_experts": 2, "num_nextn_predict_layers": 1,
         "router_scaling_factor": 1.5},
    ),
    "mistral4": (
        "Mistral3 of Mistral4",
        {**LATENT, "q_lora_rank": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
         "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
         "rope_parameters": {**USUAL_YARN, "original_max_position_embeddings": 8, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
                             "partial_rotary_factor": 8 / 28}},
    ),
    "youtu": (
        "Youtu",
        {**_LATENT, "q_lora_rank": 40, "num_hidden_layers": 3, "tie_word_embeddings": True,
         "rope_parameters": {**USUAL_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "youtu-untied": (
        "Youtu",
        {**_LATENT, "q_lora_rank": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    ),
    "minicpm3": (
        "MiniCPM3",
        {**_LATENT, "q_lora_rank": 40, "num_hidden_layers": 3, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "minicpm3-long": (
        "MiniCPM3",
        {**_LATENT, "q_lora_rank": 32, "v_head_dim": 16, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 256}},
    ),
    "granite-swa": (
        "GraniteSWA",
        {"num_hidden_layers": 5, "sliding_window": 8, "layer_rope_theta": [0, 2e4, 2e4, 2e4, 0],
         "attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
         "logits_scaling": 1.5, "attention_bias": True, "mlp_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    ),
    "granite-moe-swa": (
        "GraniteMoeSWA",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8,
         "shared_intermediate_size": 80, "attention_multiplier": 0.25,
         "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    ),
    "deepseek-v3.2": (
        "DeepseekV32",
        {**_INDEXED, "q_lora_rank": 32, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
         "num_nextn_predict_layers": 1,
         "rope_parameters": {**USUAL_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "glm-5": (
        "GlmMoeDsa",
        {**_INDEXED, "q_lora_rank": 40, "first_k_dense_replace": 2, "num_hidden_layers": 4,
         "indexer_types": ["full", "shared", "full", "shared"], "routed_scaling_factor": 1.5,
         "num_nextn_predict_layers": 1, "n_shared_experts": 2},
    ),
    "glm-5-full": (
        "GlmMoeDsa",
        {**_INDEXED, "q_lora_rank": 24, "first_k_dense_replace": 0, "norm_topk_prob": False,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
# Keys that convert_hf_to_gguf.py does not write, as in `sparse`.
RECENT_SAID_BEYOND = {
    "glm-4.7-flash": {"deepseek2.expert_gating_func"},
    "afmoe": {"afmoe.expert_gating_func", "afmoe.expert_weights_norm"},
    "exaone-moe": {"exaone-moe.expert_gating_func"},
    "hy-v3": {"hy_v3.leading_dense_block_count", "hy_v3.expert_shared_count"},
    "mistral4": {
        "mistral4.expert_gating_func",
        "mistral4.attention.temperature_scale",
        "mistral4.attention.temperature_length",
    },
    # llama.cpp asks for it, unless there are 26 or 27 blocks.
    "youtu-untied": {"deepseek2.attention.q_lora_rank"},
    "minicpm3": {"minicpm3.rope.freq_base", "minicpm3.attention.value_length"},
    "granite-swa": {"granite_swa.attention.rope_pattern"},
    "deepseek-v3.2": {"deepseek32.expert_gating_func"},
    "glm-5": {"glm-dsa.expert_gating_func"},
    "glm-5-full": {"glm-dsa.expert_gating_func"},
}
RECENT_AHEAD = ("deepseek-v3.2", "glm-5", "glm-4.7-flash", "hy-v3")
# One token for another, where inputs are rounded to float16: these are compared in float32.
NOT_ROUNDED = ("deepseek-v3.2", "glm-5", "glm-5-full")
