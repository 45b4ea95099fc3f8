"""Small checkpoints of the newest decoders; rows as in `gguf_models`."""

import json
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
}  # fmt: skip
SAID_BEYOND: dict[str, set[str]] = {}


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
    path.write_text(json.dumps(config))
