"""Small checkpoints of decoders whose classes come with them; rows as in `gguf_models`.

Each is made by a class of transformers that computes the same, and then renamed: that class tells
what llama.cpp has to compute of the file.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.gguf.families import llamas

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256,
    "short_factor": [1.0 + 0.5 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
_OF_MINICPM = {"attention_multiplier": 0.25, "embedding_multiplier": 3.0, "logits_scaling": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "kormo": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}),
    "minicpm": ("Granite", {**_OF_MINICPM, "residual_multiplier": 1.2 / math.sqrt(2)}),
    "minicpm-long": ("Granite", {**_OF_MINICPM, "residual_multiplier": 1.4 / math.sqrt(3),
                                 "num_hidden_layers": 3, "rope_parameters": _LONG,
                                 "tie_word_embeddings": True}),
    "exaone": ("Llama", {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-3}),
    "ling": (
        "GraniteMoeShared",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 2 * 96,
         "attention_multiplier": 0.25, "rope_parameters": {
             "rope_type": "default", "rope_theta": 3e4}},
    ),
    "ling-2": (
        "Glm4Moe",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
         "n_shared_experts": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True, "head_dim": 16,
         "attention_bias": False, "rope_parameters": {
             "rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}},
    ),
    # No class of transformers chooses experts before the attention: these load, and that is all.
    "smallthinker": ("Mixtral", {"num_local_experts": 4, "num_hidden_layers": 2, "head_dim": 32}),
    "smallthinker-windows": ("Mixtral", {"num_local_experts": 6, "num_hidden_layers": 5}),
}  # fmt: skip
UNLIKE = ("smallthinker", "smallthinker-windows", *llamas.UNLIKE)
NO_WAY_BACK = llamas.NO_WAY_BACK | {
    name: "lacks blk.0.attn_q.bias" if name == "kormo" else "transformers has no class"
    for name in MODELS
}
MODELS |= llamas.MODELS
# Keys that convert_hf_to_gguf.py does not write, as in `gguf_models`: llama.cpp asks for it.
SAID_BEYOND = {"exaone": {"exaone.attention.layer_norm_rms_epsilon"}}

_NORMS = (("pre_attention_layernorm", "input_layernorm"),
          ("pre_mlp_layernorm", "post_attention_layernorm"))  # fmt: skip
_OF_EXAONE = (
    ("transformer.wte", "model.embed_tokens"), ("transformer.ln_f", "model.norm"),
    ("transformer.h.", "model.layers."), (".ln_1", ".input_layernorm"),
    (".ln_2", ".post_attention_layernorm"), (".attn.attention.out_proj", ".self_attn.o_proj"),
    (".attn.attention.", ".self_attn."), ("c_fc_0", "gate_proj"), ("c_fc_1", "up_proj"),
    ("c_proj", "down_proj"),
)  # fmt: skip
_OF_LING = (
    ("model.word_embeddings", "model.embed_tokens"), ("attention.dense", "self_attn.o_proj"),
    ("attention.query_layernorm", "self_attn.q_norm"),
    ("attention.key_layernorm", "self_attn.k_norm"),
    ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    ("mlp.gate.weight", "block_sparse_moe.router.layer.weight"),
    ("mlp.shared_experts.down_proj", "shared_mlp.output_linear"),
)  # fmt: skip
_OF_SMALL = (
    ("primary_router", "gate"), (".gate.", ".w1."), (".up.", ".w3."), (".down.", ".w2."),
)  # fmt: skip
_NAMES = {
    "kormo": _NORMS, "exaone": _OF_EXAONE, "ling": _OF_LING, "ling-2": _OF_LING,
    "smallthinker": _OF_SMALL, "smallthinker-windows": _OF_SMALL,
}  # fmt: skip
State = dict[str, Any]


def _join(state: State) -> State:
    """Queries, keys and values in one matrix; gate and up of experts apart."""
    import torch

    found: State = {}
    for name, tensor in state.items():
        if name.endswith("self_attn.q_proj.weight"):
            parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            at = name.replace("self_attn.q_proj", "attention.query_key_value")
            found[at] = torch.cat(parts)
        elif re.search(r"self_attn\.[kv]_proj", name):
            continue
        elif name.endswith("shared_mlp.input_linear.weight"):
            at = name.replace("shared_mlp.input_linear", "mlp.shared_experts.{}_proj")
            found |= {at.format(p): t for p, t in zip(("gate", "up"), tensor.chunk(2), strict=True)}
        elif ".block_sparse_moe." in name and "put_linear" in name:
            at = re.sub(r"block_sparse_moe\.\w+", "mlp.experts.{}.{}_proj", name)
            parts = ("gate", "up") if "input" in name else ("down",)
            for i, one in enumerate(tensor):
                found |= {
                    at.format(i, part): matrix.clone()
                    for part, matrix in zip(parts, one.chunk(len(parts)), strict=True)
                }
        else:
            found[name] = tensor
    return found


def _of_kormo(config: State) -> State:
    return {"architectures": ["KORMoForCausalLM"], "model_type": "kormo"}


def _of_minicpm(config: State) -> State:
    depth = config["residual_multiplier"] * math.sqrt(config["num_hidden_layers"])
    return {
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm",
        "scale_emb": config["embedding_multiplier"], "scale_depth": round(depth, 6),
        "dim_model_base": int(config["hidden_size"] / config["logits_scaling"]),
    }  # fmt: skip


def _exaone_config(config: State) -> State:
    return {
        "architectures": ["ExaoneForCausalLM"], "model_type": "exaone",
        "num_layers": config["num_hidden_layers"], "activation_function": "silu",
        "layer_norm_epsilon": config["rms_norm_eps"],
        **dict.fromkeys(("num_hidden_layers", "rms_norm_eps", "hidden_act")),
    }  # fmt: skip


def _ling(config: State) -> State:
    return {
        "architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe",
        "num_experts": config["num_local_experts"], "first_k_dense_replace": 0,
        "moe_intermediate_size": config["intermediate_size"], "num_shared_experts": 2,
        "norm_topk_prob": True, "norm_head": False, "num_local_experts": None,
    }  # fmt: skip


def _ling_2(config: State) -> State:
    return {
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe",
        "num_experts": config["n_routed_experts"], "score_function": "sigmoid",
        "num_shared_experts": config["n_shared_experts"], "num_nextn_predict_layers": 0,
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        **dict.fromkeys(("n_routed_experts", "n_shared_experts")),
    }  # fmt: skip


def _small(config: State) -> State:
    windows = config["num_hidden_layers"] == 5
    layout = [0, 1, 1, 1, 0] if windows else [1, 1]
    return {
        "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker",
        "moe_num_primary_experts": config["num_local_experts"],
        "moe_num_active_primary_experts": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["intermediate_size"], "rope_layout": layout,
        "moe_primary_router_apply_softmax": windows, "sliding_window_size": 4096,
        "sliding_window_layout": layout if windows else [0, 0], "norm_topk_prob": True,
        **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "intermediate_size",
                         "hidden_act", "sliding_window")),
    }  # fmt: skip


_CONFIGS: dict[str, Callable[[State], State]] = {
    "kormo": _of_kormo, "minicpm": _of_minicpm, "minicpm-long": _of_minicpm,
    "exaone": _exaone_config, "ling": _ling, "ling-2": _ling_2, "smallthinker": _small,
    "smallthinker-windows": _small,
}  # fmt: skip


def rename(name: str, folder: Path) -> None:
    """Tensors and settings of the class that made it, as those of the checkpoint's own."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    if name in llamas.MODELS:
        config = json.loads((folder / "config.json").read_text())
        state = llamas.RENAMED[name](state, config)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return
    state = _join(state) if name.startswith("ling") else state
    for new, old in _NAMES.get(name, ()):
        state = {key.replace(old, new): tensor for key, tensor in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = {**config, **_CONFIGS[name](config)}
    own = {key: value for key, value in said.items() if value is not None or key not in config}
    (folder / "config.json").write_text(json.dumps(own))
