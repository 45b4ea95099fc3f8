"""Qwen4-Exp: gated delta nets and attention as in Qwen3.5, between several residual streams.

What goes into a block is mixed of all streams, and what comes out is added to each with a weight of
its own; there are no other norms. Attention sees a few whole blocks of tokens, which an indexer has
chosen by the mean of their keys, and the tokens since.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.formats.gguf_values import Kind, Value, array
from qtool.gguf.architectures import limits, ngrams
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.linear_attention import (
    DEFAULTS,
    DELTA_NET,
    FULL_ATTENTION,
    KEYS,
    OF_EXPERTS,
    SECTIONED,
    SPARSE_MLP,
    has_attention,
    is_linear,
)
from qtool.gguf.architectures.modules import BLOCK, Module, norms_plus_one
from qtool.gguf.architectures.mtp import MTP
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.from_hf.row_maps import some_rows

_ATTENTION = ("indexed_attention", "full_attention")  # two names of the same


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    config[MTP] = 0  # llama.cpp's file has no place for them
    if kinds := layer_types(config):
        config["layer_types"] = ["full_attention" if k in _ATTENTION else k for k in kinds]
    return config


def _part(module: Module, config: Config) -> Module:
    width = count(config, "indexer_head_dim")
    queries = count(config, "indexer_n_heads") * width
    first, last = (0, queries) if module.called.endswith("q_proj") else (queries, queries + width)
    return replace(module, rows=some_rows(first, last, queries + width, "indexer_n_heads"))


def _mixing(at: str, called: str, *, adds: bool = True) -> Iterator[Module]:
    """What a block reads of the streams, and where it adds to them."""
    streams = "all residual streams"
    yield Module(f"{at}.hc_norm", called=f"{called}_norm", shape=(streams,))
    yield Module(
        f"{at}.input_mix_weight_down", called=f"{called}_down", shape=("rank of mixing", streams)
    )
    yield Module(
        f"{at}.input_mix_weight_up", called=f"{called}_up", shape=(streams, "rank of mixing")
    )
    if adds:
        shape = ("residual streams", streams)
        yield Module(f"{at}.block_inject_weight", called=f"{called}_inject", shape=shape)


_AT = BLOCK + "self_attn.indexer."
_INDEXER = (
    Module(_AT + "index_qk_proj.q", within=_AT + "index_qk_proj", called="indexer.q_proj",
           shape=("queries that choose", "width"), fit=_part),
    Module(_AT + "index_qk_proj.k", within=_AT + "index_qk_proj", called="indexer.k_proj",
           shape=("key that is chosen by", "width"), fit=_part),
    Module(_AT + "q_layernorm", called="indexer.q_norm", shape=("key that is chosen by",)),
    Module(_AT + "k_layernorm", called="indexer.k_norm", shape=("key that is chosen by",)),
)  # fmt: skip
_AROUND = norms_plus_one(
    (
        Module("model.embed_tokens"),
        Module("lm_head", needed=False),
        *FULL_ATTENTION,
        *(replace(module, blocks=has_attention) for module in _INDEXER),
        *_mixing("model.hyper_connection_mixer", "output_hc", adds=False),
        *_mixing(BLOCK + "attn_hyper_connection", "hc_attn"),
        *_mixing(BLOCK + "mlp_hyper_connection", "hc_ffn"),
    )
)


def _compressed(config: Config) -> Value:
    """How many tokens make a block of those that are chosen, in the blocks with attention."""
    ratio = count(config, "indexer_compress_ratio")
    blocks = range(count(config, "num_hidden_layers"))
    return array(Kind.INT32, [0 if is_linear(config, b) else ratio for b in blocks])


def _sigmoid(config: Config) -> str | None:
    given = config.get("output_gate_type") or config.get("hidden_act", "silu")
    return None if given == "sigmoid" else f"output_gate_type is {given}, and it takes sigmoid"


def _more_tokens(config: Config) -> str | None:
    ratio, budget = count(config, "indexer_compress_ratio"), count(config, "indexer_budget")
    if ratio == 1 or budget >= count(config, "max_position_embeddings"):
        return None
    return (
        f"beyond {budget} tokens attention sees whole blocks of {ratio} and what came since the "
        f"last of them; llama.cpp sees up to {ratio - 1} tokens of one block more"
    )


_KEYS = (
    *KEYS,
    *OF_EXPERTS,
    SECTIONED,
    Key("hyper_connection.count", "hc_count"),
    Key("hyper_connection.low_rank", "hc_lowrank"),
    Key("attention.indexer.head_count", "indexer_n_heads"),
    Key("attention.indexer.key_length", "indexer_head_dim"),
    Key("attention.indexer.top_k", "indexer_budget"),
    Key("attention.compress_ratios", "indexer_compress_ratio", _compressed, listed=True),
)
_ROW = Architecture(
    "qwen4exp", (*_AROUND, *DELTA_NET, *SPARSE_MLP, *ngrams.MODULES), (*_KEYS, *ngrams.KEYS),
    {**DEFAULTS, **ngrams.DEFAULTS, "num_key_value_heads": 2, "num_experts": 512,
     "num_experts_per_tok": 10, "moe_intermediate_size": 512,
     "shared_expert_intermediate_size": 512, "hc_count": 4, "hc_lowrank": 320,
     "norm_topk_prob": True, "rope_partial_rotary_factor": 1.0},
    names="qwen35moe", settle=_settle, constants=ngrams.constants,
    refuse=(limits.one_state, limits.no_biases("attention_bias"), limits.chosen_add_up(True),
            _sigmoid, ngrams.one_known_block),
    warn=(limits.no_dynamic_rope, limits.one_epsilon, _more_tokens),
)  # fmt: skip
QWEN4_EXP: dict[str, Architecture] = {
    "Qwen4ExpForCausalLM": _ROW,
    "Qwen4ExpForConditionalGeneration": _ROW,
}
