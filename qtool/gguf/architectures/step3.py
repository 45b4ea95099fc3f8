"""Step 3.5 and 3.7: windows in most blocks, which have more heads there, a gate for each head, and
experts in three tensors of a block. Multi-token prediction is left out.

Released checkpoints list rope settings block by block; here they are of the two kinds of blocks.
"""

from typing import Any

import numpy as np

from qtool.checkpoints.hf_config import (
    BY_BLOCK,
    Config,
    count,
    integers,
    layer_types,
    number,
    of_block,
)
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array, boolean, u32
from qtool.gguf.architectures import limits, sparse_keys
from qtool.gguf.architectures.keys import HEAD, MOE, WINDOW, Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    QK_NORMS,
    TWO_NORMS,
    Module,
    attention,
    block,
    has_window,
    in_blocks,
    is_dense,
    is_sparse,
    norms_plus_one,
)
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import SIGMOID, gating, with_own
from qtool.messages.printable import in_json

_WINDOW = "sliding_attention"
_LEADING = 3  # blocks without experts, unless config.json says otherwise
_NAMES = {
    "num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k", "share_expert_dim": "share_expert_dims",
    "num_nextn_predict_layers": "num_mtp_layers",
}  # fmt: skip


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    """The settings as the class of transformers makes them of released ones."""
    blocks = count(config, "num_hidden_layers")
    config |= {name: config[other] for name, other in _NAMES.items() if other in config}
    for name in ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"):
        if isinstance(config.get(name), list):  # of multi-token prediction, too
            config[name] = config[name][:blocks]
    config["layer_types"] = kinds = layer_types(config) or ["full_attention"] * blocks
    if config.get("mlp_layer_types") is None:
        given = config.get("moe_layers_enum")
        if isinstance(given, str) and all(part.strip().isdecimal() for part in given.split(",")):
            given = [int(part) for part in given.split(",")]
        listed = integers({"moe_layers_enum": given}, "moe_layers_enum")
        sparse = {*listed} if listed else {*range(_LEADING, blocks)}
        config["mlp_layer_types"] = ["sparse" if b in sparse else "dense" for b in range(blocks)]
    mlps = config["mlp_layer_types"]
    leading = next((b for b, kind in enumerate(mlps) if kind != "dense"), blocks)
    config["first_k_dense_replace"] = leading
    _by_kind(config, kinds)
    other = _of_windows(config)
    heads = config.get("num_sliding_attention_heads") or other.get("num_attention_heads")
    if heads is not None:
        own = {"num_attention_heads": heads}
        config[BY_BLOCK] = [own if kind == _WINDOW else {} for kind in kinds]
    return config


def _of_windows(config: Config) -> Config:
    """Settings of blocks with a window, {} where they are like the others."""
    given = config.get("attention_other_setting") or {}
    if not isinstance(given, dict):
        raise SettingError("attention_other_setting", f"is {in_json(given)}, no table")
    return given


def _by_kind(config: dict[str, Any], kinds: list[str]) -> None:
    """Rope settings of the two kinds, of what is said of each block."""
    rope, shares = config["rope_parameters"], config.get("partial_rotary_factors")
    rope["full_attention"].setdefault("rope_theta", 1e4)
    rope.setdefault(_WINDOW, {"rope_type": "default"})
    for kind in ("full_attention", _WINDOW):
        first = kinds.index(kind) if kind in kinds else None
        bases = config.get("rope_theta")
        for name, given in (("rope_theta", bases), ("partial_rotary_factor", shares)):
            if isinstance(given, list) and first is not None:
                if len(given) <= first:
                    raise SettingError(name, f"has {len(given)} numbers, not one a block")
                rope[kind][name] = given[first]
    rope[_WINDOW].setdefault("rope_theta", rope["full_attention"]["rope_theta"])
    # Those of blocks with a window, which are not slowed, are of a whole head.
    rope["full_attention"]["divisors"] = count(config, "head_dim") // 2


def _experts(part: str) -> Module:
    shape = ("width", "inner of experts") if part == "down" else ("inner of experts", "width")
    name = f"{BLOCK}moe.{part}_proj"
    return Module(name, called=f"ffn_{part}_exps", shape=("experts", *shape))


def _shared(part: str) -> Module:
    wide = "inner of the one that is shared"
    shape = ("width", wide) if part == "down" else (wide, "width")
    return Module(f"{BLOCK}share_expert.{part}_proj", called=f"ffn_{part}_shexp", shape=shape)


_PARTS = ("gate", "up", "down")
_MODULES = norms_plus_one((
    *OUTER,
    *attention(),
    *block(*TWO_NORMS, *QK_NORMS),
    Module(BLOCK + "self_attn.g_proj", called="attn_gate", shape=("number of heads", "width")),
    *in_blocks(is_dense, block(*MLP)),
    *in_blocks(is_sparse, (
        Module(BLOCK + "moe.gate", called="ffn_gate_inp", shape=("experts", "width")),
        Module(BLOCK + "moe.router_bias", called="exp_probs_b", ends=((".bias", ""),),
               shape=("experts",)),
        *(_experts(part) for part in _PARTS),
        *(_shared(part) for part in _PARTS),
    )),
))  # fmt: skip


def _each(setting: str) -> Any:
    def make(config: Config) -> Value:
        blocks = range(count(config, "num_hidden_layers"))
        return array(Kind.INT32, [count(of_block(config, b), setting) for b in blocks])

    return make


def _windows(config: Config) -> Value:
    blocks = range(count(config, "num_hidden_layers"))
    return array(Kind.BOOL, [has_window(config, b) for b in blocks])


def _bounds(setting: str) -> Any:
    def make(config: Config) -> Value | None:
        if not config.get(setting):
            return None
        limits.listed(config, setting, count(config, "num_hidden_layers"))
        each = [number({"limit": one or 0.0}, "limit") for one in config[setting]]
        return array(Kind.FLOAT32, [float(one) for one in np.array(each, np.float32)])

    return make


def _known_shares(config: Config) -> str | None:
    for kind, expected in (("full_attention", 0.5), (_WINDOW, 1.0)):
        share = config["rope_parameters"][kind].get("partial_rotary_factor", 1.0)
        if kind in config["layer_types"] and share != expected:
            return f"{kind} rotates {share} of a head, and it takes {expected}"
    return None


def _known_settings(config: Config) -> str | None:
    scalar = config.get("query_pre_attn_scalar")
    if scalar not in (None, config["head_dim"]):
        return f"query_pre_attn_scalar is {scalar}, and it takes the width of a head"
    other = _of_windows(config)
    groups, own = other.get("num_attention_groups"), config["num_key_value_heads"]
    if groups not in (None, own):
        return f"there are {groups} heads of keys in blocks with a window, and the class has {own}"
    if config["rope_parameters"][_WINDOW].get("rope_type", "default") != "default":
        return "blocks with a window have a rope scaling of their own, and it takes none"
    return None


_KEYS = with_own(
    (key for key in MOE if not key.name.startswith("rope.scaling.")),
    *HEAD,
    Key("attention.head_count", "num_attention_heads", _each("num_attention_heads"), listed=True),
    Key("attention.head_count_kv", "num_key_value_heads", _each("num_key_value_heads"),
        listed=True),
    WINDOW,
    Key("attention.sliding_window_pattern", "layer_types", _windows, listed=True),
    Key("expert_count", "n_routed_experts"),
    Key("expert_shared_feed_forward_length", "share_expert_dim"),
    Key("expert_weights_scale", "moe_router_scaling_factor", real=True),
    Key("expert_weights_norm", "", lambda _: boolean(True), flag=True),
    sparse_keys.LEADING,
    Key("moe_every_n_layers", "", lambda _: u32(1)),
    Key("swiglu_clamp_exp", "swiglu_limits", _bounds("swiglu_limits"), listed=True),
    Key("swiglu_clamp_shexp", "swiglu_limits_shared", _bounds("swiglu_limits_shared"),
        listed=True),
    gating(SIGMOID),
)  # fmt: skip

STEP3: dict[str, Architecture] = {
    name: Architecture(
        "step35", _MODULES, _KEYS,
        {"num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 288,
         "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
         "moe_router_scaling_factor": 1.0, "max_position_embeddings": 128000,
         "rms_norm_eps": 1e-5},
        rope=("default", "llama3"), needs_head=True, settle=_settle,
        refuse=(limits.no_biases("attention_bias", "mlp_bias"), _known_shares, _known_settings,
                limits.taken(("moe_router_activation", "sigmoid"), ("norm_expert_weight", True))),
        warn=(),
    )
    for name in ("Step3p7ForConditionalGeneration", "Step3p5ForCausalLM")
}  # fmt: skip
