"""Small decoders whose blocks hand on more than one stream of hidden states."""

from typing import Any

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_TURNS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_GEMMA = {
    **SMALL, "head_dim": 16, "sliding_window": 16, "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16, "layer_types": _TURNS, "num_kv_shared_layers": 3,
    "tie_word_embeddings": True,
}  # fmt: skip
_LATENT = {
    **SMALL, "num_hidden_layers": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_INDEXED = {
    "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2,
    "layer_types": ["indexed_attention"] * 4, "indexer_types": ["full", "shared"] * 2,
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_SEEING = {"hidden_size": 32, "image_size": 28, "patch_size": 14, "intermediate_size": 64,
           "num_attention_heads": 2, "num_hidden_layers": 1}  # fmt: skip
_MIXED = {"mlp_layer_types": ["dense", "sparse"] * 2}

# By name: the model type and its configuration.
HANDED: dict[str, tuple[str, dict[str, Any]]] = {
    # The last blocks attend to keys and values of those before them.
    "gemma4": ("gemma4_text", {**_GEMMA, "use_double_wide_mlp": True,
                               "per_layer_config": {"2": {"head_dim": 32},
                                                    "5": {"head_dim": 32}}}),
    "gemma4_moe": ("gemma4_text", {**_GEMMA, "enable_moe_block": True, "num_experts": 4,
                                   "top_k_experts": 2, "moe_intermediate_size": 32}),
    # The same, and four streams of hidden states before the samples.
    "gemma3n": ("gemma3n_text", {**_GEMMA, "intermediate_size": [96] * 6, "laurel_rank": 16,
                                 "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4}),
    # Positions that one block chooses are attended to by the next one.
    "glm_moe_dsa": ("glm_moe_dsa", {**_LATENT, **_INDEXED, **_EXPERTS, **_MIXED,
                                    "q_lora_rank": 32}),
    # Streams behind the length, and positions.
    "hy_v4": ("hy_v4", {**_LATENT, **_INDEXED, **_EXPERTS, **_MIXED, "q_lora_rank": 32,
                        "head_dim": 8}),
    # Streams, and experts that are chosen by the word.
    "deepseek_v4": ("deepseek_v4", {
        **SMALL, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32,
        "qk_rope_head_dim": 8, "partial_rotary_factor": 0.25, "o_groups": 2, "o_lora_rank": 32,
        "q_lora_rank": 32, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "sliding_window": 16, "mlp_layer_types": ["hash_moe", "moe"] * 2,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "swiglu_limit": 1e6}),  # which no scale can meet: a clamp keeps scales off down_proj
    # Positions, and latent keys and values of other sizes with rotary embedding and without.
    "mistral_large4": ("mistral_large4", {
        "text_config": {**_LATENT, **_INDEXED, **_EXPERTS, **_MIXED, "head_dim": 8,
                        "indexer_types": ["full", "full", "shared", "full"],
                        "no_rope_layers": [1, 0, 1, 0], "kv_source_layers": [0, 1, 0, 1]},
        "vision_config": {"model_type": "pixtral", **_SEEING, "head_dim": 16},
        "image_token_index": 95}),
    # Streams, positions and blocks without either.
    "glm5_next": ("glm5_next", {
        "text_config": {**_LATENT, **_INDEXED, **_EXPERTS, **_MIXED, "qk_rope_head_dim": 0,
                        "q_lora_rank": 32, "head_dim": 0, "linear_num_heads": 4,
                        "linear_head_dim": 16, "index_kpool": 4,
                        "layer_types": ["indexed_attention", "indexed_attention",
                                        "linear_attention", "indexed_attention"],
                        "indexer_types": ["full", "shared", "shared", "full"]},
        "vision_config": {**_SEEING, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
                          "projection_intermediate_size": 64}}),
    # What a router has seen goes into the next one.
    "zaya": ("zaya", {
        **SMALL, "num_hidden_layers": 4, "head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 1, "moe_intermediate_size": 32, "router_hidden_size": 16}),
}  # fmt: skip
