"""Decoders with a short convolution between two gates in most blocks, attention in the others
(LFM2), with one MLP in each or with experts."""

from dataclasses import replace

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    Module,
    attention,
    before,
    block,
    in_blocks,
    since,
)
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.from_hf.row_maps import FIRST_HALF, SECOND_HALF, RowMap

CONVOLUTION = "conv"


def _kinds(config: Config) -> list[str]:
    if kinds := layer_types(config):
        return kinds
    blocks = range(count(config, "num_hidden_layers"))
    given = config.get("full_attn_idxs")
    attending = {*blocks} if given is None else {*given}
    return ["full_attention" if b in attending else CONVOLUTION for b in blocks]


def _convolves(config: Config, b: int) -> bool:
    return _kinds(config)[b] == CONVOLUTION


def _attends(config: Config, b: int) -> bool:
    return not _convolves(config, b)


def _key_heads(config: Config) -> Value:
    heads = count(config, "num_key_value_heads")
    return array(Kind.INT32, [0 if kind == CONVOLUTION else heads for kind in _kinds(config)])


def _inner_width(config: Config) -> Value:
    from qtool.gguf.architectures.sizes import SIZES

    return u32(SIZES["inner of LFM2"](config))


def _mlp(inner: str) -> tuple[Module, ...]:
    shapes = ((inner, "width"), (inner, "width"), ("width", inner))
    return tuple(
        Module(f"{BLOCK}feed_forward.{name}", shape=shape)
        for name, shape in zip(("w1", "w3", "w2"), shapes, strict=True)
    )


def _expert(name: str, called: str, fused: str, rows: RowMap | None) -> Module:
    at = BLOCK + "feed_forward.experts."
    inner = ("width", "inner of experts") if name == "w2" else ("inner of experts", "width")
    return Module(
        at + name,
        each=(f"{at}{{i}}.{name}", "num_experts"),
        fused=(at + fused, rows),
        shape=("experts", *inner),
        called=called,
    )


_AROUND = (
    OUTER[0],
    Module("model.embedding_norm"),
    replace(OUTER[2], called="output"),  # the gguf package has none with experts
    *block("operator_norm", "ffn_norm"),
    *in_blocks(
        _attends,
        (
            *attention()[:3],
            Module(BLOCK + "self_attn.out_proj", shape=("width", "heads")),
            Module(BLOCK + "self_attn.q_layernorm", shape=("head",)),
            Module(BLOCK + "self_attn.k_layernorm", shape=("head",)),
        ),
    ),
    *in_blocks(
        _convolves,
        (
            Module(BLOCK + "conv.conv", shape=("width", "taps"), squeezed=True),
            Module(BLOCK + "conv.in_proj", shape=("three widths", "width")),
            Module(BLOCK + "conv.out_proj", shape=("width", "width")),
        ),
    ),
)
_EXPERTS = in_blocks(
    since("num_dense_layers"),
    (
        Module(BLOCK + "feed_forward.gate", shape=("experts", "width")),
        Module(BLOCK + "feed_forward.expert_bias", ends=((".bias", ""),), shape=("experts",)),
        _expert("w1", "ffn_gate_exps", "gate_up_proj", FIRST_HALF),
        _expert("w3", "ffn_up_exps", "gate_up_proj", SECOND_HALF),
        _expert("w2", "ffn_down_exps", "down_proj", None),
    ),
)
_KEYS = with_own(
    keys.USUAL,
    replace(keys.RMS, setting="norm_eps"),
    keys.VOCABULARY,
    Key("attention.head_count_kv", "num_key_value_heads", _key_heads, listed=True, lacking=True),
    Key("shortconv.l_cache", "conv_L_cache"),
)


def _no_scale(config: Config) -> str | None:
    given = config.get("routed_scaling_factor", 1.0)
    return None if given == 1.0 else f"routed_scaling_factor is {given}, and it takes 1.0"


_REFUSE = (limits.plain_heads, limits.no_biases("conv_bias"))
_DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5,
    "rope_theta": 1e6, "vocab_size": 65536, "conv_L_cache": 3, "tie_word_embeddings": True,
}  # fmt: skip

# fmt: off
SHORT_CONVOLUTIONS: dict[str, Architecture] = {
    "Lfm2ForCausalLM": Architecture(
        "lfm2", (*_AROUND, *_mlp("inner of LFM2")),
        with_own(_KEYS, Key("feed_forward_length", "intermediate_size", _inner_width)),
        {**_DEFAULTS, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
         "block_auto_adjust_ff_dim": True},
        refuse=_REFUSE, warn=(limits.no_dynamic_rope,),
    ),
    "Lfm2MoeForCausalLM": Architecture(
        "lfm2moe",
        (*_AROUND, *in_blocks(before("num_dense_layers"), _mlp("inner")), *_EXPERTS),
        with_own(
            _KEYS,
            Key("expert_feed_forward_length", "moe_intermediate_size"),
            Key("leading_dense_block_count", "num_dense_layers"),
            sparse_keys.gating(sparse_keys.SIGMOID),
        ),
        {**_DEFAULTS, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1792, "norm_topk_prob": True, "use_expert_bias": True},
        refuse=(*_REFUSE, limits.chosen_add_up(True), limits.needs("use_expert_bias"), _no_scale),
        warn=(limits.no_dynamic_rope,),
    ),
}
# fmt: on
