"""MiniMax M3: blocks of tokens that attention sees are chosen by an indexer, for each head of keys,
wherever a block of the model has experts. llama.cpp chooses with flash attention alone, and sees
all tokens without."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.errors import SettingError
from qtool.formats.gguf_values import boolean
from qtool.gguf.architectures import limits, sparse_keys
from qtool.gguf.architectures.dense import QWEN
from qtool.gguf.architectures.keys import USUAL, Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    QK_NORMS,
    Module,
    before,
    block,
    choice_bias,
    in_blocks,
    norms_plus_one,
    since,
)
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import ROTATED, SIGMOID, gating, with_own
from qtool.gguf.from_hf.row_maps import FIRST_HALF, SECOND_HALF, RowMap, some_rows

SPARSE = "minimax_m3_sparse"
_LEADING, _SHARED = "first_k_dense_replace", "n_shared_experts"
_ONE = "matrices"  # of a kind, of which there is one
_NAMES = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}  # fmt: skip


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    """The settings as the class of transformers makes them of released ones."""
    blocks = count(config, "num_hidden_layers")
    config[_ONE] = 1
    own = config.get("sparse_attention_config") or {}
    if not isinstance(own, dict):
        raise SettingError("sparse_attention_config", "is not an object")
    config |= {name: own[other] for name, other in _NAMES.items() if other in own}
    for name, given, (yes, no) in (
        ("layer_types", own.get("sparse_attention_freq"), (SPARSE, "full_attention")),
        ("mlp_layer_types", config.get("moe_layer_freq"), ("sparse", "dense")),
    ):
        if config.get(name) is None:
            each = given if isinstance(given, list) else [name == "mlp_layer_types"] * blocks
            config[name] = [yes if one else no for one in each]
    mlps = config["mlp_layer_types"]
    config[_LEADING] = next((b for b, kind in enumerate(mlps) if kind != "dense"), blocks)
    return config


def _half(setting: str) -> Any:
    """Of a matrix that has those of gate and up; setting: how wide each is."""

    def fit(module: Module, config: Config) -> Module:
        wide = count(config, setting) * (1 if "dense" in setting else count(config, _SHARED))
        first = wide if module.name.endswith("up") else 0
        return replace(module, rows=some_rows(first, first + wide, 2 * wide, _ONE))

    return fit


def _mlp(at: str, released: str, wide: str, setting: str, end: str = "") -> Iterator[Module]:
    for part in ("gate", "up"):
        yield Module(
            f"{BLOCK}{at}gate_up_proj.{part}", within=f"{BLOCK}{at}gate_up_proj",
            called=f"ffn_{part}{end}", shape=(wide, "width"), fit=_half(setting),
            each=(f"{BLOCK}{released}{part}_proj", _ONE),
        )  # fmt: skip
    yield Module(
        f"{BLOCK}{at}down_proj", also=(f"{BLOCK}{released}down_proj",), called=f"ffn_down{end}",
        shape=("width", wide),
    )  # fmt: skip


def _experts(part: str, released: str, rows: RowMap | None = None) -> Module:
    at = f"{BLOCK}mlp.experts.{'down' if rows is None else 'gate_up'}_proj"
    shape = ("width", "inner") if rows is None else ("inner", "width")
    return Module(
        f"{at}.{part}", rows, within=at, called=f"ffn_{part}_exps", ends=((".weight", ""),),
        each=(f"{BLOCK}block_sparse_moe.experts.{{i}}.{released}.weight", "num_experts"),
        shape=("experts", *shape),
    )  # fmt: skip


_AT = BLOCK + "self_attn."
_INDEXER = tuple(
    Module(f"{_AT}indexer.{name}", also=(f"{_AT}index_{name}",), called=f"indexer.{name}",
           shape=shape)
    for name, shape in (
        ("q_proj", ("indexer's queries", "width")), ("k_proj", ("indexer's key", "width")),
        ("q_norm", ("indexer's key",)), ("k_norm", ("indexer's key",)),
    )
)  # fmt: skip
_MODULES = norms_plus_one((
    *QWEN,
    *block(*QK_NORMS),
    *in_blocks(before(_LEADING), tuple(
        _mlp("mlp.", "mlp.", "inner of dense blocks", "dense_intermediate_size")
    )),
    *in_blocks(since(_LEADING), (
        Module(BLOCK + "mlp.gate", also=(BLOCK + "block_sparse_moe.gate",)),
        replace(choice_bias("mlp.gate.e_score_correction"), called="exp_probs_b",
                also=(BLOCK + "block_sparse_moe.e_score_correction",)),
        _experts("gate", "w1", FIRST_HALF), _experts("up", "w3", SECOND_HALF),
        _experts("down", "w2"),
        *_mlp("mlp.shared_experts.", "block_sparse_moe.shared_experts.",
              "inner of all that are shared", "intermediate_size", "_shexp"),
        *_INDEXER,
    )),
))  # fmt: skip


def _known(config: Config) -> str | None:
    for name, expected in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.get(name, expected) != expected:
            return f"{name} is {config[name]}, and it takes {expected}"
    wide = config.get("shared_intermediate_size")
    own = count(config, "n_shared_experts") * count(config, "intermediate_size")
    if wide not in (None, own):
        return f"shared experts are {wide} wide, and it takes {own}, as of the others"
    heads, keys = count(config, "index_n_heads"), count(config, "num_key_value_heads")
    if heads != keys:
        return f"index_n_heads is {heads}, and it takes as many as heads of keys ({keys})"
    return None


def _chosen_where_sparse(config: Config) -> str | None:
    leading, kinds = config[_LEADING], layer_types(config)
    if kinds == ["full_attention" if b < leading else SPARSE for b in range(len(kinds))]:
        return None
    return "an indexer is not in all blocks with experts, and only there, which it expects"


def _rotated_as_said(config: Config) -> str | None:
    share = config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1.0)
    told, width = config.get("rotary_dim"), count(config, "head_dim")
    if told in (None, int(width * share)):
        return None
    return f"rotary_dim is {told}, and the class rotates {int(width * share)} of {width} elements"


_KEYS = with_own(
    USUAL,
    Key("feed_forward_length", "dense_intermediate_size"),
    Key("expert_feed_forward_length", "intermediate_size"),
    ROTATED,
    gating(SIGMOID),
    sparse_keys.SHARED_COUNT,
    sparse_keys.SCALED,
    sparse_keys.LEADING,
    Key("expert_weights_norm", "", lambda _: boolean(True), flag=True),
    Key("attention.indexer.head_count", "index_n_heads"),
    Key("attention.indexer.key_length", "index_head_dim"),
    Key("attention.indexer.top_k", "index_topk_blocks"),
    Key("attention.indexer.block_size", "index_block_size"),
    Key("attention.indexer.local_blocks", "index_local_blocks"),
)

MINIMAX_M3: dict[str, Architecture] = {
    name: Architecture(
        "minimax-m3", _MODULES, _KEYS,
        {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 4,
         "dense_intermediate_size": 12288, "n_shared_experts": 1, "routed_scaling_factor": 2.0,
         "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128,
         "index_topk_blocks": 16, "index_local_blocks": 1, "max_position_embeddings": 524288,
         "rms_norm_eps": 1e-6, "rope_theta": 5e6},
        activations=("silu", "swigluoai"), names="minimax-m2", needs_head=True, settle=_settle,
        rope=("default",), alone="MiniMaxM3VLForCausalLM",
        refuse=(limits.dense_first, _known, _chosen_where_sparse, _rotated_as_said,
                limits.taken(("scoring_func", "sigmoid"))), warn=(),
    )
    for name in ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForCausalLM",
                 "MiniMaxM3SparseForConditionalGeneration")
}  # fmt: skip
