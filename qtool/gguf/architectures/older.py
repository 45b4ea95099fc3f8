"""Decoders of the first years: GPT-2, whose matrices are stored as [in, out], StarCoder, Bloom,
MPT, Falcon.

Falcon has queries, a key and a value group by group in one matrix; llama.cpp has all queries, then
all keys, then all values. Positions are added, told by distance (ALiBi), or rotated.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from qtool.checkpoints.hf_config import FOUR_WIDTHS, Config, count, number
from qtool.formats.gguf_values import Value, f32, string, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import Module, Where, in_blocks
from qtool.gguf.architectures.row import GELU, Architecture
from qtool.gguf.from_hf.row_maps import QKV_BY_KIND, listed

_T = "transformer."
_HEAD = Module("lm_head", needed=False)


def _named(name: str, *shape: str, called: str = "", **more: Any) -> Module:
    """Released checkpoints leave `transformer.` out."""
    return Module(_T + name, also=(name,), shape=shape, called=called, **more)


_EPSILON = Key("attention.layer_norm_epsilon", "layer_norm_epsilon", real=True)
_SIZES = tuple(
    key for key in keys.SIZES if not key.name.endswith(("head_count_kv", "context_length"))
)
_QKV, _INNER = ("three widths", "width"), ("inner", "width")
_GPT2 = (
    _named("wte", "vocabulary", "width", called="token_embd"),
    _named("wpe", "positions", "width", called="position_embd"),
    _named("ln_f", "width", called="output_norm"),
    _HEAD,
    _named("h.{b}.ln_1", "width", called="attn_norm"),
    _named("h.{b}.attn.c_attn", *_QKV, called="attn_qkv", transposed=True),
    _named("h.{b}.attn.c_proj", "width", "width", called="attn_output", transposed=True),
    _named("h.{b}.ln_2", "width", called="ffn_norm"),
    _named("h.{b}.mlp.c_fc", *_INNER, called="ffn_up", transposed=True),
    _named("h.{b}.mlp.c_proj", "width", "inner", called="ffn_down", transposed=True),
)


def _by_head(module: Module, config: Config) -> Module:
    """Query, key and value of each head, where not one key and value are of all heads."""
    return module if config.get("multi_query") else replace(module, rows=QKV_BY_KIND)


_STARCODER = (
    *(replace(m, transposed=False) for m in _GPT2 if m.called != "attn_qkv"),
    _named("h.{b}.attn.c_attn", "queries, keys, values", "width", called="attn_qkv", fit=_by_head),
)
_BLOOM = (
    _named("word_embeddings", "vocabulary", "width", called="token_embd"),
    _named("word_embeddings_layernorm", "width", called="token_embd_norm"),
    _named("ln_f", "width", called="output_norm"),
    _HEAD,
    _named("h.{b}.input_layernorm", "width", called="attn_norm"),
    _named("h.{b}.self_attention.query_key_value", *_QKV, called="attn_qkv", rows=QKV_BY_KIND),
    _named("h.{b}.self_attention.dense", "width", "width", called="attn_output"),
    _named("h.{b}.post_attention_layernorm", "width", called="ffn_norm"),
    _named("h.{b}.mlp.dense_h_to_4h", *_INNER, called="ffn_up"),
    _named("h.{b}.mlp.dense_4h_to_h", "width", "inner", called="ffn_down"),
)
_MPT = (
    _named("wte", "vocabulary", "width", called="token_embd"),
    _named("norm_f", "width", called="output_norm"),
    _HEAD,
    _named("blocks.{b}.norm_1", "width", called="attn_norm"),
    _named("blocks.{b}.attn.Wqkv", *_QKV, called="attn_qkv"),
    _named("blocks.{b}.attn.out_proj", "width", "width", called="attn_output"),
    _named("blocks.{b}.norm_2", "width", called="ffn_norm"),
    _named("blocks.{b}.ffn.up_proj", *_INNER, called="ffn_up"),
    _named("blocks.{b}.ffn.down_proj", "width", "inner", called="ffn_down"),
)


def key_heads(config: Config) -> int:
    """One for all where it says so, which newer ones do not heed."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    names = ("num_kv_heads", "num_key_value_heads")
    own = next((name for name in names if config.get(name) is not None), "num_attention_heads")
    return count(config, own)


def _groups(module: Module, config: Config) -> Module:
    heads, groups = count(config, "num_attention_heads"), key_heads(config)
    width, each = count(config, "hidden_size") // heads, heads // groups + 2
    there = np.arange(groups * each * width, dtype=np.int64).reshape(groups, each, width)
    parts = (there[:, :-2], there[:, -2], there[:, -1])
    order = np.concatenate([part.reshape(-1) for part in parts])
    return replace(module, rows=listed(order, len(order), "num_attention_heads"))


def _two_norms(config: Config, b: int) -> bool:
    new = bool(config.get("new_decoder_architecture"))
    return new and (config.get("num_ln_in_parallel_attn") or 2) == 2


def _one_norm(config: Config, b: int) -> bool:
    return not _two_norms(config, b)


def _norms(where: Where, *names: tuple[str, str]) -> tuple[Module, ...]:
    modules = (_named(f"h.{{b}}.{name}", "width", called=called) for name, called in names)
    return in_blocks(where, tuple(modules))


_FALCON = (
    _named("word_embeddings", "vocabulary", "width", called="token_embd"),
    _named("ln_f", "width", called="output_norm"),
    _HEAD,
    *_norms(_two_norms, ("ln_mlp", "attn_norm"), ("ln_attn", "attn_norm_2")),
    *_norms(_one_norm, ("input_layernorm", "attn_norm")),
    _named("h.{b}.self_attention.query_key_value", "Falcon's queries, keys, values", "width",
           called="attn_qkv", fit=_groups),
    _named("h.{b}.self_attention.dense", "width", "width", called="attn_output"),
    _named("h.{b}.mlp.dense_h_to_4h", *_INNER, called="ffn_up"),
    _named("h.{b}.mlp.dense_4h_to_h", "width", "inner", called="ffn_down"),
)  # fmt: skip


def _key_heads_told(config: dict[str, Any]) -> dict[str, Any]:
    """Of StarCoder, whose class makes the number of key heads of what else is said."""
    one = config.get("multi_query", config.get("num_key_value_heads", 1) == 1)
    heads = 1 if one else config.get("num_attention_heads")
    return {**config, "multi_query": one, "num_key_value_heads": heads}


def _of_attention(make: Callable[[Config], Value | None]) -> Callable[[Config], Value | None]:
    """Of MPT, which says how it attends in an object of its own."""

    def value(config: Config) -> Value | None:
        own = config.get("attn_config")
        return make(own if isinstance(own, dict) else {})

    return value


def _bias(own: Config) -> Value:
    return f32(number({"alibi_bias_max": own.get("alibi_bias_max", 8)}, "alibi_bias_max"))


def _clamp(own: Config) -> Value | None:
    return None if own.get("clip_qkv") is None else f32(number(own, "clip_qkv"))


def _known_attention(config: Config) -> str | None:
    own = config.get("attn_config") or {}
    usual = {"alibi": True, "qk_ln": False, "softmax_scale": None, "prefix_lm": False}
    heads = own.get("kv_n_heads")
    if heads is not None and heads != count(config, "num_attention_heads"):
        return f"kv_n_heads is {heads}, and transformers has as many as heads"
    return limits.taken(*usual.items())({**usual, **own})


def _other_slope(config: Config) -> str | None:
    given = (config.get("attn_config") or {}).get("alibi_bias_max", 8)
    if given == 8:
        return None
    return f"alibi_bias_max is {given}, and transformers takes 8: llama.cpp gives other results"


_DEFAULTS = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
_FALCON_LENGTH = 2048  # what llama.cpp is told of all of them

# fmt: off
_MPT_ROW = Architecture(
    "mpt", _MPT,
    (*_SIZES, Key("context_length", "max_seq_len"), _EPSILON,
     Key("attention.max_alibi_bias", "attn_config", _of_attention(_bias)),
     Key("attention.clamp_kqv", "attn_config", _of_attention(_clamp))),
    {**_DEFAULTS, "max_seq_len": 2048, "intermediate_size": FOUR_WIDTHS},
    activations=GELU,
    refuse=(_known_attention, limits.taken(("expansion_ratio", 4), ("logit_scale", None))),
    warn=(_other_slope,),
)

OLDER: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(
        "gpt2", _GPT2, (*_SIZES, Key("context_length", "n_positions"), _EPSILON),
        {**_DEFAULTS, "n_positions": 1024, "intermediate_size": FOUR_WIDTHS},
        activations=("gelu_new", "gelu_pytorch_tanh", "gelu"),
        refuse=(limits.taken(("scale_attn_weights", True), ("add_cross_attention", False),
                             ("scale_attn_by_inverse_layer_idx", False)),),
        warn=(),
    ),
    "GPTBigCodeForCausalLM": Architecture(
        "starcoder", _STARCODER,
        (*_SIZES, Key("context_length", "n_positions"), _EPSILON,
         Key("attention.head_count_kv", "num_key_value_heads")),
        {**_DEFAULTS, "n_positions": 1024, "intermediate_size": FOUR_WIDTHS},
        activations=GELU, settle=_key_heads_told,
        refuse=(limits.taken(("scale_attn_weights", True), ("add_cross_attention", False)),),
        warn=(),
    ),
    "BloomForCausalLM": Architecture(
        "bloom", _BLOOM,
        (*_SIZES, Key("attention.head_count_kv", "num_attention_heads"), _EPSILON,
         Key("context_length", "seq_length")),
        {**_DEFAULTS, "intermediate_size": FOUR_WIDTHS, "seq_length": "hidden_size"},
        activations=GELU,
        refuse=(limits.taken(("apply_residual_connection_post_layernorm", False)),), warn=(),
    ),
    "MPTForCausalLM": _MPT_ROW,
    "MptForCausalLM": _MPT_ROW,  # as transformers calls it
    "FalconForCausalLM": Architecture(
        "falcon", _FALCON,
        (*_SIZES, Key("attention.head_count_kv", "num_kv_heads",
                      lambda config: u32(key_heads(config))),
         Key("context_length", "", lambda _: u32(_FALCON_LENGTH)),
         Key("tensor_data_layout", "", lambda _: string("jploski")), _EPSILON,
         keys.BASE_UNLESS_USUAL),
        {**_DEFAULTS, "intermediate_size": FOUR_WIDTHS, "rope_theta": 1e4, "multi_query": True,
         "new_decoder_architecture": False, "parallel_attn": True},
        activations=GELU, rope=("default",),
        refuse=(limits.no_biases("bias", "alibi"), limits.taken(("parallel_attn", True))), warn=(),
    ),
}
# fmt: on
