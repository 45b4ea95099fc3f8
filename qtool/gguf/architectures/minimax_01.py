"""MiniMax Text 01 and M1: lightning attention, whose states forget at a rate of each head, and
softmax attention in some blocks between; experts everywhere.

    hidden = norm(hidden);  hidden = alpha * hidden + part(hidden)

Released checkpoints and transformers name the same settings otherwise: attn_type_list and
layer_types, layernorm_*_alpha and *_alpha_factor.
"""

from typing import Any

from qtool.checkpoints.hf_config import Config, count, head_width, integers, number
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.linear_attention import has_attention, is_linear
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    TWO_NORMS,
    Module,
    attention,
    block,
    experts,
    in_blocks,
)
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import with_own

_PARTS = {
    "full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp",
}  # fmt: skip
_EVERY = 8  # blocks, of which the last has softmax attention, where a file does not say


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    for part, released in _PARTS.items():
        for name in ("alpha", "beta"):
            older = f"layernorm_{released}_{name}"
            config.setdefault(f"{part}_{name}_factor", config.get(older, 1))
    blocks = count(config, "num_hidden_layers")
    if config.get("layer_types") is None:
        given = integers(config, "attn_type_list")
        full = [bool(one) for one in given] or [bool((b + 1) % 2) for b in range(blocks)]
        kinds = ["full_attention" if one else "linear_attention" for one in full]
        config["layer_types"] = kinds
    limits.listed(config, "layer_types", blocks)
    return config


_AT = BLOCK + "self_attn."
_MODULES = (
    *OUTER,
    *block(*TWO_NORMS),
    *in_blocks(has_attention, attention()),
    *in_blocks(is_linear, (
        Module(_AT + "qkv_proj", shape=("three of each head", "width"), called="attn_qkv"),
        Module(_AT + "norm", shape=("heads",), called="attn_norm_2"),
        Module(_AT + "output_gate", shape=("heads", "width"), called="attn_gate"),
        Module(_AT + "out_proj", shape=("width", "heads"), called="attn_output"),
    )),
    Module(BLOCK + "block_sparse_moe.gate", also=(BLOCK + "mlp.gate",), called="ffn_gate_inp"),
    *experts("block_sparse_moe.experts", "w1", "w3", "w2"),
)  # fmt: skip


def usual_kinds(blocks: int) -> list[bool]:
    """Which blocks llama.cpp takes to have lightning attention."""
    return [(b + 1) % _EVERY != 0 for b in range(blocks)]


def _linear(config: Config) -> Value | None:
    """Left out where it is as usual: converters say nothing of it."""
    own = [is_linear(config, b) for b in range(count(config, "num_hidden_layers"))]
    return None if own == usual_kinds(len(own)) else array(Kind.BOOL, own)


def _rotated(config: Config) -> Value:
    own = config.get("rotary_dim") is not None
    return u32(count(config, "rotary_dim") if own else head_width(config))


def _one_scale(config: Config) -> str | None:
    alphas = {number(config, f"{part}_alpha_factor") for part in _PARTS}
    betas = {number(config, f"{part}_beta_factor") for part in _PARTS}
    if betas != {1}:
        return f"what parts give is multiplied by {max(betas)}, and it takes 1"
    if len(alphas) > 1:
        return f"streams are multiplied by {min(alphas)} and {max(alphas)}, and it takes one number"
    return None


def _one_epsilon(config: Config) -> str | None:
    if number(config, "rms_norm_eps") == 1e-6:
        return None
    return (
        f"rms_norm_eps is {config['rms_norm_eps']}, which llama.cpp adds to the norm of lightning "
        "attention too, where the model adds 1e-6: results differ a little"
    )


def _several(config: Config) -> str | None:
    return (
        "there is one block, and it takes two or more" if config["num_hidden_layers"] < 2 else None
    )


_ROW = Architecture(
    "minimax-01", _MODULES,
    with_own(
        keys.USUAL, Key("rope.dimension_count", "", _rotated),
        Key("residual_scale", "full_attn_alpha_factor", real=True),
        Key("attention.recurrent_layers", "", _linear, listed=True),
    ),
    {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2,
     "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
     "vocab_size": 32000},
    rope=("default",), names="minimax-m2", settle=_settle,
    refuse=(_one_scale, _several,
            limits.taken(("postnorm", True), ("shared_intermediate_size", 0), ("qk_norm", False))),
    warn=(_one_epsilon, limits.no_window),
)  # fmt: skip
MINIMAX_01: dict[str, Architecture] = {
    "MiniMaxForCausalLM": _ROW,
    "MiniMaxText01ForCausalLM": _ROW,
    "MiniMaxM1ForCausalLM": _ROW,
}
