"""MiMo V2: windows in most blocks, which have more heads of keys there and a sink of attention for
each head; values are narrower than keys and scaled.

Released checkpoints and transformers name the same settings otherwise: hybrid_layer_pattern and
layer_types, moe_layer_freq and mlp_layer_types, swa_rope_theta and rope_parameters.
"""

from typing import Any

from qtool.checkpoints.hf_config import BY_BLOCK, Config, count, of_block
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    TWO_NORMS,
    Module,
    block,
    choice_bias,
    experts,
    has_window,
    in_blocks,
    is_dense,
    is_sparse,
)
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import with_own

_WINDOW = "sliding_attention"
_EVERY = (
    6  # blocks, of which the last has no window, unless config.json says otherwise; nor the 1st
)


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    """Released settings under the names that the class of transformers has."""
    blocks = count(config, "num_hidden_layers")
    for name, older, words in (
        ("layer_types", "hybrid_layer_pattern", ("full_attention", _WINDOW)),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse")),
    ):
        if config.get(name) is None and isinstance(config.get(older), list):
            config[name] = [words[bool(one)] for one in config[older]]
    usual = [b > 0 and (b + 1) % _EVERY != 0 for b in range(blocks)]
    if config.get("layer_types") is None:
        config["layer_types"] = [_WINDOW if one else "full_attention" for one in usual]
    if config.get("mlp_layer_types") is None:
        config["mlp_layer_types"] = ["sparse" if b else "dense" for b in range(blocks)]
    for name in ("layer_types", "mlp_layer_types"):
        limits.listed(config, name, blocks)
    if config.get("sliding_window_size"):  # tokens before the one that looks
        config["sliding_window"] = count(config, "sliding_window_size") + 1
    wider = config.get("swa_num_key_value_heads") or 2 * count(config, "num_key_value_heads")
    config[BY_BLOCK] = [
        {"num_key_value_heads": wider} if kind == _WINDOW else {} for kind in config["layer_types"]
    ]
    return config


def _key_heads(config: Config) -> Value:
    blocks = range(count(config, "num_hidden_layers"))
    return array(Kind.INT32, [count(of_block(config, b), "num_key_value_heads") for b in blocks])


def _windows(config: Config) -> Value:
    blocks = range(count(config, "num_hidden_layers"))
    return array(Kind.INT32, [int(has_window(config, b)) for b in blocks])


def _rotated(config: Config, kind: str = "full_attention") -> int:
    share = config["rope_parameters"][kind].get("partial_rotary_factor", _SHARE)
    return int(count(config, "head_dim") * share)


def _one_rotation(config: Config) -> str | None:
    local = config["rope_parameters"][_WINDOW]
    if local["rope_type"] != "default":
        return f"blocks with windows have rope scaling {local['rope_type']}, and it takes none"
    if _rotated(config, _WINDOW) != _rotated(config):
        return "blocks with windows rotate another share of a head, and it takes one for all"
    return None


def _one_head(config: Config) -> str | None:
    for name in ("num_attention_heads", "head_dim", "v_head_dim"):
        own = config.get(f"swa_{name}")
        if own is not None and own != config[name]:
            return f"swa_{name} is {own}, and it takes {config[name]} as in the other blocks"
    return None


def _unscaled(config: Config) -> str | None:
    given = config.get("routed_scaling_factor")
    return None if given in (None, 1) else f"routed_scaling_factor is {given}, and it takes 1"


_SHARE = 0.334  # of a head that is rotated
_AT = BLOCK + "self_attn."
_MODULES = (
    *OUTER,
    *block("self_attn.q_proj", "self_attn.k_proj", *TWO_NORMS),
    Module(_AT + "v_proj", shape=("key heads of values", "width")),
    Module(_AT + "o_proj", shape=("width", "heads of values")),
    Module(_AT + "attention_sink_bias", also=(_AT + "sinks",), ends=((".weight", ""),),
           shape=("number of heads",), blocks=has_window),
    *in_blocks(is_dense, block(*MLP)),
    *in_blocks(is_sparse, (
        *experts("mlp.experts", "gate_proj", "up_proj", "down_proj", "n_routed_experts"),
        *block("mlp.gate"),
        choice_bias("mlp.gate.e_score_correction"),
    )),
)  # fmt: skip
_KEYS = with_own(
    keys.MOE,
    Key("expert_count", "n_routed_experts"),
    *sparse_keys.GROUPS,
    Key("attention.head_count_kv", "num_key_value_heads", _key_heads, listed=True),
    keys.WINDOW,
    Key("attention.sliding_window_pattern", "layer_types", _windows, listed=True),
    Key("attention.value_length", "v_head_dim"),
    Key("attention.value_scale", "attention_value_scale", real=True),
    Key("rope.dimension_count", "rope_parameters", lambda config: u32(_rotated(config))),
)

MIMO_V2: dict[str, Architecture] = {
    "MiMoV2FlashForCausalLM": Architecture(
        "mimo2", _MODULES, _KEYS,
        {"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "n_routed_experts": 256,
         "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1,
         "norm_topk_prob": True, "sliding_window": 129, "attention_value_scale": 0.707,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e6,
         "rope_local_base_freq": 1e4, "rope_partial_rotary_factor": _SHARE},
        rope=("default",), needs_head=True, settle=_settle,
        refuse=(limits.chosen_add_up(True), limits.no_biases("attention_bias"), _unscaled,
                _one_rotation, _one_head,
                limits.taken(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))),
        warn=(),
    ),
}  # fmt: skip
