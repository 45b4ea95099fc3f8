"""Small checkpoints of models that also see, around decoders of other classes; rows as in
`gguf_models`, and what lies around the settings of the text."""

from pathlib import Path
from typing import Any

from support.gguf.families.recent import LATENT

_ROTATED = {"rope_type": "default", "rope_theta": 2e4}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip

# Released models have their images among the first tokens, which llama.cpp never gives.
_IMAGES = range(4, 8196)
_CHAMELEON = {
    "vocab_size": len(_IMAGES) + 40,
    "vocabulary_map": {**{f"IMGIMG{i}Z": i for i in _IMAGES}, "<image>": 8200},
    "vq_config": {"resolution": 16, "base_channels": 32, "channel_multiplier": [1],
                  "num_res_blocks": 1, "embed_dim": 16, "latent_channels": 16,
                  "num_embeddings": 16},
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("Llava", {"head_dim": 32, "rope_parameters": _LLAMA3}),
    "pixtral": ("Llava of Mistral", {"head_dim": 32, "sliding_window": None}),
    "idefics3": ("Idefics3", {"rope_parameters": _ROTATED}),
    "smolvlm": ("SmolVLM", {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "internvl": ("InternVL", {"rope_parameters": _ROTATED}),
    "lfm2-vl": (
        "Lfm2Vl",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
         "block_multiple_of": 16, "block_ffn_dim_multiplier": 0.9},
    ),
    "exaone4.5": (
        "Exaone4_5_",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2,
         "num_nextn_predict_layers": 1, "rope_parameters": _LLAMA3},
    ),
    "glm4v": ("Glm4v", {"attention_bias": True, "rope_parameters": {
        **_ROTATED, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}}),
    "glm-ocr": (
        "GlmOcr",
        {"head_dim": 32, "num_nextn_predict_layers": 1, "rope_parameters": {
            **_ROTATED, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}},
    ),
    "glm4v-moe": (
        "Glm4vMoe",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "num_hidden_layers": 3, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
         "rope_parameters": {**_ROTATED, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    ),
    "hunyuan-vl": (
        "HunYuanVL",
        {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0,
            "mrope_section": [4, 4, 4, 4]}},
    ),
    "paddleocr-vl": ("PaddleOCRVL", {"head_dim": 32, "rope_parameters": {
        **_ROTATED, "mrope_section": [6, 5, 5]}}),
    "minicpm-v-4.6": ("MiniCPMV4_6", {
        "num_hidden_layers": 2, "head_dim": 32, "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}),
    "granite-4-vision": ("Granite4Vision", {
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "logits_scaling": 2.0, "num_hidden_layers": 3}),
    "janus": ("Janus", {"num_key_value_heads": 4, "tie_word_embeddings": False,
                        "rope_parameters": _ROTATED}),
    "muse-glimmer": ("MuseGlimmer", {
        "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 8, "qk_scale_factor": 2.5,
        "output_multiplier": 0.4, "final_logit_softcapping": 6.0}),
    "kimi-k2.5": ("Kimi_K25", {
        **LATENT, "q_lora_rank": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "rope_parameters": _ROTATED}),
    "qwen2.5-omni": ("Qwen2_5OmniThinker", {"rope_parameters": {
        **_ROTATED, "mrope_section": [2, 4, 2]}}),
    "qwen3-omni": ("Qwen3OmniMoeThinker", {
        "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "rope_parameters": {**_ROTATED, "mrope_section": [6, 5, 5]}}),
    "chameleon": ("Chameleon", {
        **_CHAMELEON, "num_key_value_heads": 4, "rope_parameters": _ROTATED}),
    "chameleon-heads": ("Chameleon", {**_CHAMELEON, "tie_word_embeddings": True}),
}  # fmt: skip
# The logits that count, where some are those of tokens that are never given.
GIVEN = {"chameleon": slice(_IMAGES.stop, None), "chameleon-heads": slice(_IMAGES.stop, None)}
SAID_BEYOND: dict[str, set[str]] = {"kimi-k2.5": {"deepseek2.expert_gating_func"}}
_SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 16,
}  # fmt: skip
# Of those whose vision is Qwen's.
_QWEN = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "in_channels": 3,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
    "intermediate_size": 48,
}  # fmt: skip
_SIGLIP = {**_SMALL, "model_type": "siglip2_vision_model", "num_patches": 16}


def _inside(kind: str, name: str) -> dict[str, Any]:
    """As released checkpoints say it, whose converter goes by the name."""
    return {"model_type": kind, "architectures": [name]}


_HEARS = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "num_mel_bins": 16, "output_dim": 64,
}  # fmt: skip
_GLM = {"text_config": {}, "vision_config": {**_QWEN, "image_size": 16}}
SEEING: dict[str, dict[str, Any]] = {
    "Llava": {"text_config": {"model_type": "llama"},
              "vision_config": {**_SMALL, "model_type": "clip_vision_model"}},
    "Llava of Mistral": {"text_config": {"model_type": "mistral"},
                         "vision_config": {**_SMALL, "model_type": "pixtral"}},
    "Idefics3": {"text_config": _inside("llama", "LlamaForCausalLM"), "vision_config": _SMALL},
    "SmolVLM": {"text_config": _inside("llama", "VLlama3ForCausalLM"), "vision_config": _SMALL},
    "InternVL": {"text_config": _inside("qwen2", "Qwen2ForCausalLM"), "tie_word_embeddings": False,
                 "vision_config": {**_SMALL, "image_size": [16, 16], "patch_size": [4, 4]}},
    "Lfm2Vl": {"text_config": _inside("lfm2", "Lfm2ForCausalLM"), "vision_config": _SIGLIP},
    "Exaone4_5_": {"text_config": {"model_type": "exaone4"},
                   "vision_config": {**_QWEN, "num_key_value_heads": 1,
                                     "fullatt_block_indexes": [0]}},
    "HunYuanVL": {"text_config": {}, "vision_config": _SMALL},
    "PaddleOCRVL": {"text_config": {}, "vision_config": _SMALL},
    "MiniCPMV4_6": {"text_config": {"model_type": "qwen3_5_text"}, "insert_layer_id": 0,
                    "vision_config": _SMALL},
    "Granite4Vision": {
        "text_config": {"architectures": ["GraniteForCausalLM"]},
        "vision_config": {**_SMALL, "model_type": "siglip_vision_model", "hidden_size": 64},
        "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 1], [0, 0]],
        "spatial_target_layers": [2]},
    "Janus": {"text_config": {"model_type": "llama"}, "tie_word_embeddings": False,
              "vision_config": {**_SMALL, "projection_dim": 64},
              "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
                            "latent_channels": 32, "num_embeddings": 16, "projection_dim": 64,
                            "image_token_embed_dim": 64}},
    "MuseGlimmer": {
        "text_config": {}, "out_hidden_size": 128, "projector_hidden_size": 32,
        "vision_config": {**_SMALL, "pos_emb_height": 4, "pos_emb_width": 4}},
    "Kimi_K25": {
        "text_config": _inside("deepseek_v3", "DeepseekV3ForCausalLM"),
        "tie_word_embeddings": False, "projection_hidden_size": 32,
        "vision_config": {**_SMALL, "pos_emb_height": 4, "pos_emb_width": 4}},
    "Qwen2_5OmniThinker": {
        "text_config": {}, "audio_config": _HEARS,
        "vision_config": {**_QWEN, "fullatt_block_indexes": [0]}},
    "Qwen3OmniMoeThinker": {
        "text_config": {}, "audio_config": {**_HEARS, "downsample_hidden_size": 16},
        "vision_config": {**_QWEN, "num_position_embeddings": 16,
                          "deepstack_visual_indexes": [0]}},
    "Glm4v": _GLM, "GlmOcr": _GLM, "Glm4vMoe": _GLM,
}  # fmt: skip


def fill(name: str, model: Any) -> None:
    """Values for norms of heads; released ones of 7B are the same in all heads."""
    for key, parameter in model.named_parameters():
        if name in GIVEN and (".q_norm." in key or ".k_norm." in key):
            parameter.uniform_(-0.3, 0.3)
            parameter.add_(1.0 if key.endswith(".weight") else 0.0)
            if name == "chameleon":
                parameter.copy_(parameter[:1].expand_as(parameter).clone())


def finish(name: str, folder: Path) -> None:
    """Names as released, where save_pretrained changes more of them than from_pretrained."""
    if name != "kimi-k2.5":
        return
    from safetensors.torch import load_file, save_file

    path, wrong = folder / "model.safetensors", "language_model.model.blocks."
    state = {key.replace(wrong, wrong.replace("blocks", "layers")): value
             for key, value in load_file(path).items()}  # fmt: skip
    save_file(state, path, {"format": "pt"})
