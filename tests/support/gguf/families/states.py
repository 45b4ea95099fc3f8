"""Small checkpoints of decoders with state spaces alone or beside attention; rows as in
`gguf_models`."""

from typing import Any

_MAMBA = {"conv_kernel": 3, "state_size": 8, "layer_norm_epsilon": 1e-6}
_JAMBA = {
    "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8,
    "mamba_d_conv": 3, "mamba_dt_rank": 6,
}  # fmt: skip
_H1 = {
    "head_dim": 32, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_d_conv": 3, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**_MAMBA, "time_step_rank": 6}),
    "mamba-untied": ("Mamba", {"tie_word_embeddings": False}),
    "falcon-mamba": ("FalconMamba", {**_MAMBA, "mixer_rms_eps": 1e-6, "num_hidden_layers": 3}),
    "mamba2": (
        "Mamba2",
        {**_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "mamba2-tied": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16,
         "tie_word_embeddings": True},
    ),
    "jamba": (
        "Jamba",
        {**_JAMBA, "num_experts": 6, "num_experts_per_tok": 3, "expert_layer_period": 2,
         "expert_layer_offset": 1},
    ),
    "jamba-dense": ("Jamba", {**_JAMBA, "num_experts": 1, "num_experts_per_tok": 1,
                              "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "falcon-h1": (
        "FalconH1",
        {**_H1, "embedding_multiplier": 2.7, "lm_head_multiplier": 0.37, "key_multiplier": 0.31,
         "mlp_multipliers": [0.77, 0.43], "attention_in_multiplier": 0.9,
         "attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.23,
         "ssm_multipliers": [0.35, 0.26, 0.54, 0.19, 0.61], "mamba_norm_before_gate": False,
         "mamba_rms_norm": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e11}},
    ),
    "falcon-h1-tied": (
        "FalconH1",
        {**_H1, "mamba_n_groups": 1, "tie_word_embeddings": True, "embedding_multiplier": 1.5,
         "lm_head_multiplier": 1.5, "rms_norm_eps": 1e-6},
    ),
}  # fmt: skip
# Architectures with a rate for each channel and state.
OF_RATES = ("mamba", "jamba")
ALONE = ("Mamba", "FalconMamba", "Mamba2")  # without attention and MLPs


def fill(model: Any) -> None:
    """Rates of some tokens to a thousand, as trained models have."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log") and parameter.ndim == 2:
            parameter.uniform_(-2.0, 2.0)
        if name.endswith("x_proj.weight"):  # and no state beyond float16
            parameter.mul_(0.05)
