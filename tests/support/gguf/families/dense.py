"""Small models of the dense families beyond the first ones; rows as in `gguf_models`."""

from typing import Any

_YARN = {
    "rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0,
    "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 2e4, "mrope_section": [2, 4, 2]}
_WINDOWS = ["sliding_attention", "full_attention"]


def _by_kind(full: dict[str, Any]) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": plain}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-vl": ("Qwen2VL", {"rope_parameters": _SECTIONS}),
    "qwen2.5-vl": ("Qwen2_5_VL", {"num_key_value_heads": 1, "rms_norm_eps": 1e-6,
                                  "rope_parameters": {**_YARN, "mrope_section": [3, 3, 2]}}),
    "qwen3-vl": ("Qwen3VL", {"head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 2e4, "mrope_section": [6, 5, 5]}}),
    "qwen3-vl-moe": ("Qwen3VLMoe", {
        "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e4,
                            "mrope_section": [6, 5, 5]}}),
    "mistral3": ("Mistral3", {"head_dim": 32, "sliding_window": None}),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": {
        **_YARN, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3}}),
    "command-r": ("Cohere", {"logit_scale": 0.25, "rope_parameters": {
        "rope_type": "default", "rope_theta": 3e4}, "model_max_length": 512}),
    "command-r-plus": ("Cohere", {"num_hidden_layers": 64, "use_qk_norm": True,
                                  "hidden_size": 32, "logit_scale": 0.5,
                                  "initializer_range": 0.0005,
                                  "layer_norm_eps": 1e-6}),
    "command-r7b": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 8, "rotary_pct": 1.0,
                                "logit_scale": 0.125}),
    "command-a-windows": ("Cohere2", {"sliding_window": 8, "rotary_pct": 1.0,
                                      "layer_types": _WINDOWS}),
    "jais2": ("Jais2", {"head_dim": 32, "layer_norm_eps": 1e-6,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}),
    "apertus": ("Apertus", {"rope_parameters": _LLAMA3, "num_hidden_layers": 3}),
    "olmo": ("Olmo", {"clip_qkv": 0.5, "num_key_value_heads": 4}),
    "olmo-tied": ("Olmo", {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 8, **_by_kind(_YARN)}),
    "olmo3-windows": ("Olmo3", {"sliding_window": 8, "layer_types": _WINDOWS,
                                **_by_kind({"rope_type": "default", "rope_theta": 3e4})}),
    "seed-oss": ("SeedOss", {"head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6}}),
    "seed-oss-tied": ("SeedOss", {"head_dim": 16, "attention_bias": False,
                                  "tie_word_embeddings": True}),
    "exaone4": ("Exaone4", {"sliding_window": None, "tie_word_embeddings": True,
                            "layer_types": ["full_attention"] * 2,
                            "rope_parameters": _LLAMA3}),
    "exaone4-32b": ("Exaone4", {"num_hidden_layers": 64, "hidden_size": 32, "sliding_window": 8}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 2e4}}),
    "ernie4.5-untied": ("Ernie4_5", {"head_dim": 16, "tie_word_embeddings": False}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32, "tie_word_embeddings": True}),
    "hunyuan-alpha": ("HunYuanDenseV1", {"head_dim": 16, "max_position_embeddings": 32768,
                                         "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}}),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True}),
    "glm4-tied": ("Glm4", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 2e4,
                                               "partial_rotary_factor": 0.25}}),
    # As the converter takes it for granted of all of them.
    "glm": ("Glm", {"head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                        "partial_rotary_factor": 0.25}}),
    "glm-own": ("Glm", {"head_dim": 16, "attention_bias": False, "rms_norm_eps": 1e-3,
                        "tie_word_embeddings": True,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 2e3,
                                            "partial_rotary_factor": 0.5}}),
    "arcee": ("Arcee", {"head_dim": 32, "rope_parameters": {
        **_YARN, "beta_fast": 32.0, "beta_slow": 1.0}}),
    "arcee-llama3": ("Arcee", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "nemotron": ("Nemotron", {"norm_eps": 1e-6}),
    "nemotron-biases": ("Nemotron", {"attention_bias": True, "mlp_bias": True, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 2e4, "factor": 2.0, "partial_rotary_factor": 0.25}}),
    "starcoder2": ("Starcoder2", {"norm_epsilon": 1e-6, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e5}}),
    "starcoder2-untied": ("Starcoder2", {"tie_word_embeddings": False,
                                         "num_key_value_heads": 4}),
    "phi2": ("Phi", {"num_key_value_heads": 4, "intermediate_size": 256, "layer_norm_eps": 1e-6}),
    "phi2-rotary": ("Phi", {"num_key_value_heads": 4, "intermediate_size": 256,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 3e3,
                                                "partial_rotary_factor": 0.25}}),
    "gpt2": ("GPT2", {"n_positions": 96, "initializer_range": 0.05}),
    "gpt2-inner": ("GPT2", {"n_positions": 64, "n_inner": 160, "layer_norm_epsilon": 1e-6,
                            "initializer_range": 0.05}),
    "internlm3": ("InternLM3", {"head_dim": 32, "attention_bias": True, "mlp_bias": True,
                                "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}),
    "starcoder": ("GPTBigCode", {"n_positions": 96, "initializer_range": 0.05}),
    "starcoder-heads": ("GPTBigCode", {
        "n_positions": 64, "n_inner": 160, "layer_norm_epsilon": 1e-6, "multi_query": False,
        "tie_word_embeddings": False, "initializer_range": 0.05}),
    "bloom": ("Bloom", {"layer_norm_epsilon": 1e-6}),
    "mpt": ("Mpt", {"max_seq_len": 96, "attn_config": {"clip_qkv": 0.5}}),
    "mpt-plain": ("Mpt", {"max_seq_len": 64, "layer_norm_epsilon": 1e-5}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-7b": ("Falcon", {"multi_query": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 3e4}}),
    "falcon-11b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2,
                              "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
}  # fmt: skip
# Keys that convert_hf_to_gguf.py does not write, and llama.cpp would assume something else.
SAID_BEYOND = {
    "command-a-windows": {"cohere2.attention.sliding_window_pattern"},
    "falcon-7b": {"falcon.rope.freq_base"},
    "phi2-rotary": {"phi2.rope.freq_base"},
}
_SMALL_VISION = {
    "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4,
    "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
}  # fmt: skip
_QWEN3 = {
    "text_config": {},
    "vision_config": {**_SMALL_VISION, "out_hidden_size": 64, "intermediate_size": 48,
                      "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}  # fmt: skip
# What lies around the settings of the text of models that also see, by the configuration's class.
SEEING: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"text_config": {}, "vision_config": _SMALL_VISION},
    "Qwen2_5_VL": {
        "text_config": {},
        "vision_config": {**_SMALL_VISION, "out_hidden_size": 64, "intermediate_size": 48,
                          "fullatt_block_indexes": [0]},
    },
    "Qwen3VL": _QWEN3,
    "Qwen3VLMoe": _QWEN3,
    "Mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": _PIXTRAL},
    "Mistral3 of Mistral4": {
        "text_config": {"model_type": "mistral4"}, "vision_config": _PIXTRAL,
    },
}  # fmt: skip
