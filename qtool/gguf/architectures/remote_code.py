"""Decoders whose classes come with their checkpoints: KORMo, MiniCPM, EXAONE 3, Ling, SmallThinker.

transformers has none of them, so that a file is written, and not made a checkpoint again.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, head_width, integers, number
from qtool.formats.gguf_values import Value, f32, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.dense import LLAMA
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.latent_mlp import known_longrope
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    TWO_NORMS,
    Module,
    attention,
    before,
    block,
    choice_bias,
    experts,
    in_blocks,
    since,
)
from qtool.gguf.architectures.row import LLAMA_ROPE, OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse_keys import SIGMOID, SOFTMAX, with_own
from qtool.gguf.from_hf.row_maps import RowMap, Rows

_LEADING = "first_k_dense_replace"
_KORMO = (
    *OUTER,
    *attention(),
    *block(*MLP),
    Module(BLOCK + "pre_attention_layernorm", shape=("width",), called="attn_norm"),
    Module(BLOCK + "pre_mlp_layernorm", shape=("width",), called="ffn_norm"),
)


def _exaone(name: str, called: str, *shape: str) -> Module:
    return Module("transformer.h.{b}." + name, shape=shape, called=called)


_EXAONE = (
    Module("transformer.wte", shape=("vocabulary", "width"), called="token_embd"),
    Module("transformer.ln_f", shape=("width",), called="output_norm"),
    OUTER[2],
    _exaone("ln_1", "attn_norm", "width"),
    _exaone("attn.attention.q_proj", "attn_q", "heads", "width"),
    _exaone("attn.attention.k_proj", "attn_k", "key heads", "width"),
    _exaone("attn.attention.v_proj", "attn_v", "key heads", "width"),
    _exaone("attn.attention.out_proj", "attn_output", "width", "heads"),
    _exaone("ln_2", "ffn_norm", "width"),
    _exaone("mlp.c_fc_0", "ffn_gate", "inner", "width"),
    _exaone("mlp.c_fc_1", "ffn_up", "inner", "width"),
    _exaone("mlp.c_proj", "ffn_down", "width", "inner"),
)
_QKV = BLOCK + "attention.query_key_value"


def _part(which: int) -> Callable[[Module, Config], Module]:
    """Queries, keys or values of the matrix that has them one below the other; the first two in
    pairs of neighbours."""

    def fit(module: Module, config: Config) -> Module:
        width, heads, groups = (
            head_width(config), count(config, "num_attention_heads"),
            count(config, "num_key_value_heads"),
        )  # fmt: skip
        size = (heads, groups, groups)[which] * width
        first, half = (0, heads, heads + groups)[which] * width, width // 2

        def forward(rows: Rows, _: int, total: int) -> Rows:
            k = rows % width
            there: Rows = first + (rows if which == 2 else rows - k + k % 2 * half + k // 2)
            return there

        def inverse(rows: Rows, _: int, total: int) -> Rows:
            k = (rows - first) % width
            here: Rows = rows - first - (0 if which == 2 else k - k % half * 2 - k // half)
            return here

        whole = (heads + 2 * groups) * width
        rows = RowMap(forward, inverse, "num_attention_heads", taken=(whole, size))
        return replace(module, rows=rows)

    return fit


_LING = (
    Module("model.word_embeddings", shape=("vocabulary", "width"), called="token_embd"),
    *OUTER[1:],
    *block(*TWO_NORMS, "mlp.gate"),
    *experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    *block(*(name.replace("mlp.", "mlp.shared_experts.") for name in MLP)),
    Module(BLOCK + "attention.dense", shape=("width", "heads"), called="attn_output"),
)
_PARTS = tuple(
    Module(f"{_QKV}.{name}", within=_QKV, shape=(rows, "width"), called=f"attn_{name}",
           fit=_part(which))
    for which, (name, rows) in enumerate((("q", "heads"), ("k", "key heads"), ("v", "key heads")))
)  # fmt: skip
_OF_EXPERTS = ("mlp.gate", ".experts.", "shared_experts")
_LING_2 = (
    *(m for m in _LING if not any(part in m.name for part in _OF_EXPERTS)),
    *in_blocks(before(_LEADING), block(*MLP)),
    *in_blocks(since(_LEADING), (
        *(m for m in _LING if any(part in m.name for part in _OF_EXPERTS)),
        replace(choice_bias("mlp.gate.expert_bias"), ends=((".bias", ""),), needed=False,
                shape=("experts",), called="exp_probs_b"),
    )),
    Module(_QKV, shape=("queries, keys, values", "width"), called="attn_qkv"),
    Module(BLOCK + "attention.query_layernorm", shape=("head",), called="attn_q_norm"),
    Module(BLOCK + "attention.key_layernorm", shape=("head",), called="attn_k_norm"),
)  # fmt: skip
_MOE = BLOCK + "block_sparse_moe."
_SMALL = (
    *OUTER,
    *attention(),
    *block(*TWO_NORMS),
    Module(_MOE + "primary_router", shape=("experts", "width"), called="ffn_gate_inp"),
    *(Module(f"{_MOE}experts.{name}", each=(f"{_MOE}experts.{{i}}.{name}", "num_experts"),
             shape=("experts", *shape), called=f"ffn_{name}_exps")
      for name, shape in (("gate", ("inner of experts", "width")),
                          ("up", ("inner of experts", "width")),
                          ("down", ("width", "inner of experts")))),
)  # fmt: skip


def _residual_scale(config: Config) -> Value:
    return f32(number(config, "scale_depth") / math.sqrt(count(config, "num_hidden_layers")))


def _logit_scale(config: Config) -> Value:
    return f32(count(config, "hidden_size") / count(config, "dim_model_base"))


def _sparse_attention(config: Config) -> str | None:
    if not config.get("sparse_config"):
        return None
    return "long texts are attended to in parts of them, and llama.cpp attends to all: results vary"


_FUNCTIONS = {"sigmoid": SIGMOID, "softmax": SOFTMAX}


def _known_scores(config: Config) -> str | None:
    given = config.get("score_function")
    return None if given in (None, *_FUNCTIONS) else f"score_function is {given!r:.40}"


def _scores(config: Config) -> Value:
    return u32(_FUNCTIONS.get(str(config.get("score_function")), SIGMOID))


def _width_of_shared(config: Config) -> Value:
    """Of one of them."""
    own = config.get("moe_shared_expert_intermediate_size") is not None
    return u32(count(config, f"moe_{'shared_expert_' if own else ''}intermediate_size"))


def _shared_as_wide(config: Config) -> str | None:
    given, usual = config.get("moe_shared_expert_intermediate_size"), "moe_intermediate_size"
    if given in (None, config.get(usual)):
        return None
    return f"shared experts are {given} wide, and this reads {usual} of them ({config.get(usual)})"


def _small(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of SmallThinker's experts under the names that others have."""
    names = {
        "num_experts": "moe_num_primary_experts", "intermediate_size": "moe_ffn_hidden_size",
        "num_experts_per_tok": "moe_num_active_primary_experts",
        "moe_intermediate_size": "moe_ffn_hidden_size",
    }  # fmt: skip
    return {**config, **{name: config.get(theirs) for name, theirs in names.items()}}


_WINDOW = 4096  # whatever a file says


def _windowed(config: Config) -> bool:
    return any(integers(config, "sliding_window_layout"))


def _small_window(config: Config) -> Value | None:
    return u32(count(config, "sliding_window_size")) if _windowed(config) else None


def _known_layout(config: Config) -> str | None:
    """Blocks with windows rotate, and each fourth has neither; or none has windows, and all
    rotate."""
    blocks = count(config, "num_hidden_layers")
    windows = _windowed(config)
    usual = [int(not windows or b % 4 != 0) for b in range(blocks)]
    if windows and config.get("sliding_window_size") != _WINDOW:
        return f"sliding_window_size is {config.get('sliding_window_size')}, and it takes {_WINDOW}"
    for name in ("rope_layout", *(("sliding_window_layout",) if windows else ())):
        given = integers(config, name)
        if config.get(name) is not None and [int(bool(one)) for one in given] != usual:
            return f"{name} is not {usual[:5]} and so on, which it takes for granted"
    if any(one != 1 for one in config.get("moe_layer_layout") or []):
        return "some blocks have no experts, and it expects experts in each"
    return None


def _small_scores(config: Config) -> Value:
    return u32(SOFTMAX if config.get("moe_primary_router_apply_softmax") else SIGMOID)


_NO_BIASES = limits.no_biases("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias")

# fmt: off
_ROWS: dict[str, Architecture] = {
    "KORMoForCausalLM": Architecture(
        "qwen2", _KORMO, keys.USUAL, OWN_HEADS,
        refuse=(limits.plain_heads, limits.no_biases("attention_bias", "mlp_bias")),
    ),
    "MiniCPMForCausalLM": Architecture(
        "minicpm", (*LLAMA, *block(*MLP)),
        (*keys.USUAL, Key("embedding_scale", "scale_emb", real=True),
         Key("residual_scale", "", _residual_scale), Key("logit_scale", "", _logit_scale)),
        {**OWN_HEADS, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1,
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        rope=("default", "linear", "longrope", "su"),
        refuse=(limits.plain_heads, known_longrope, limits.no_biases("attention_bias")),
        warn=(_sparse_attention, limits.no_dynamic_rope),
    ),
    "ExaoneForCausalLM": Architecture(
        "exaone", _EXAONE,
        with_own(
            keys.USUAL, keys.ROTATED,
            Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", real=True),
            Key("attention.layer_norm_epsilon", "layer_norm_epsilon", real=True),
        ),
        {**OWN_HEADS, "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5,
         "rope_theta": 1e4},
        rope=LLAMA_ROPE, refuse=(limits.plain_heads, limits.whole_heads_rotated),
    ),
    "BailingMoeForCausalLM": Architecture(
        "bailingmoe", (*_LING, *_PARTS),
        with_own(
            keys.MOE, keys.VOCABULARY, keys.ROTATED_OF_HEAD,
            Key("leading_dense_block_count", _LEADING),
            Key("expert_weights_scale", "", lambda _: f32(1.0)),
            Key("expert_shared_count", "num_shared_experts"), sparse_keys.ADD_UP,
        ),
        {**OWN_HEADS, _LEADING: 0, "norm_topk_prob": False, "rope_theta": 1e4},
        needs_head=True,
        refuse=(_NO_BIASES, limits.whole_heads_rotated,
                limits.taken((_LEADING, 0), ("norm_head", False), ("num_nextn_predict_layers", 0))),
    ),
    "BailingMoeV2ForCausalLM": Architecture(
        "bailingmoe2", _LING_2,
        with_own(
            keys.MOE, keys.VOCABULARY, keys.ROTATED_OF_HEAD, *sparse_keys.GROUPS,
            sparse_keys.LEADING, sparse_keys.SCALED, sparse_keys.ADD_UP,
            Key("expert_shared_count", "num_shared_experts"),
            Key("expert_shared_feed_forward_length", "", _width_of_shared),
            Key("expert_gating_func", "", _scores),
            Key("nextn_predict_layers", "num_nextn_predict_layers"),
        ),
        {**OWN_HEADS, _LEADING: 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
         "rope_theta": 1e4, "rope_partial_rotary_factor": 0.5},
        needs_head=True,
        refuse=(_NO_BIASES, limits.plain_heads, _shared_as_wide, _known_scores,
                limits.taken(("use_qk_norm", True), ("num_nextn_predict_layers", 0))),
    ),
    "SmallThinkerForCausalLM": Architecture(
        "smallthinker", _SMALL,
        with_own(keys.MOE, Key("attention.sliding_window", "", _small_window),
                 Key("expert_gating_func", "", _small_scores)),
        {**OWN_HEADS, "rope_theta": 1e4, "norm_topk_prob": True},
        activations=("relu",), rope=("default", "linear", "yarn"), settle=_small,
        refuse=(_known_layout, limits.chosen_add_up(True),
                limits.taken(("moe_enable_secondary_experts", False),
                             ("moe_enable_early_router", True))),
        warn=(limits.no_dynamic_rope,),
    ),
}
# fmt: on
REMOTE_CODE = {name: replace(row, remote=True) for name, row in _ROWS.items()}
