"""Small models of Gemma 4 and 3n; rows as in `gguf_models`."""

from pathlib import Path
from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"
_SHAPE = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_hidden_layers": 4,
    "layer_types": [_SLIDING, _SLIDING, _FULL, _FULL], "hidden_size_per_layer_input": 0,
}  # fmt: skip
_ROPE = {
    _FULL: {"rope_type": "proportional", "rope_theta": 3e4, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 2e3},
}
# Keys as values in blocks without a window, as in 31B and 26B-A4B.
_KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
_SHARED = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 3,
    "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
}  # fmt: skip
_EXPERTS = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_UNIFIED = {k: v for k, v in _SHAPE.items() if k != "hidden_size_per_layer_input"}
_UNIFIED["moe_intermediate_size"] = None  # as released; the converter asks for it
# Whatever llama.cpp takes as E2B and E4B have it.
_3N = {
    "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 22, "num_kv_shared_layers": 2,
    "layer_types": [*[*[_SLIDING] * 4, _FULL] * 4, _SLIDING, _FULL],
    "vocab_size_per_layer_input": 90,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4Text", {**_SHAPE, "final_logit_softcapping": 12.0}),
    "gemma4-31b": (
        "Gemma4Text",
        {**_SHAPE, **_KEYS_AS_VALUES, "rope_parameters": _ROPE, "tie_word_embeddings": False},
    ),
    "gemma4-26b-a4b": (
        "Gemma4Text",
        {**_SHAPE, **_KEYS_AS_VALUES, **_EXPERTS, "final_logit_softcapping": 9.0,
         "rms_norm_eps": 1e-5},
    ),
    "gemma4-heads": (
        "Gemma4Text",
        {**_SHAPE, "final_logit_softcapping": 9.0, "num_key_value_heads": 4, "per_layer_config": {
            block: {"head_dim": 32, "num_key_value_heads": 2} for block in (2, 3)}},
    ),
    "gemma4-e2b": (
        "Gemma4Text",
        {**_SHAPE, **_INPUTS, **_SHARED, "use_double_wide_mlp": True,
         "final_logit_softcapping": 15.0, "num_key_value_heads": 1},
    ),
    "gemma4-e4b": ("Gemma4Text", {**_SHAPE, **_INPUTS, **_SHARED, "rope_parameters": _ROPE}),
    "gemma4-sees": ("Gemma4", {**_SHAPE, **_INPUTS, "final_logit_softcapping": 12.0}),
    "gemma3n": ("Gemma3nText", {**_3N, "intermediate_size": 1024, "rms_norm_eps": 1e-5}),
    "gemma3n-few": (
        "Gemma3nText",
        {**_3N, "num_hidden_layers": 12, "num_kv_shared_layers": 0, "layer_types": None,
         "intermediate_size": 512, "vocab_size_per_layer_input": 96, "tie_word_embeddings": False,
         "rope_parameters": {_FULL: {"rope_type": "default", "rope_theta": 3e4},
                             _SLIDING: {"rope_type": "default", "rope_theta": 2e3}}},
    ),
    "gemma4-12b": ("Gemma4Unified", {**_UNIFIED, **_KEYS_AS_VALUES, "rope_parameters": _ROPE}),
}  # fmt: skip
# What lies around the settings of the text of those that also see and hear.
SEEING: dict[str, dict[str, Any]] = {
    "Gemma4": {
        "text_config": {},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                          "patch_size": 4, "position_embedding_size": 16},
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "output_proj_dims": 32, "subsampling_conv_channels": [8, 4]},
    },
    "Gemma4Unified": {
        "text_config": {},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16,
                          "output_proj_dims": 64},
        "audio_config": {"audio_embed_dim": 32, "output_proj_dims": 64},
    },
}  # fmt: skip
# llama.cpp would bound logits by 30 where nothing is said.
SAID_BEYOND = {
    name: {"gemma4.final_logit_softcapping"} for name in ("gemma4-31b", "gemma4-e4b", "gemma4-12b")
}


# Of gates that are close to the bound, one or another: compared in float32.
NOT_ROUNDED = ("gemma3n", "gemma3n-few")


def add_unread(folder: Path) -> None:
    """Keys and values of Gemma 3n's blocks that share; released checkpoints have them there."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    for block in range(20, 22):
        for name in ("k_proj", "v_proj", "k_norm"):
            one = state[f"model.layers.{block - 4}.self_attn.{name}.weight"]
            state[f"model.layers.{block}.self_attn.{name}.weight"] = -one
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def fill(model: Any) -> None:
    """What each block multiplies by, which is one in new models."""
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.4)
