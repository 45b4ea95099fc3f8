"""Hunyuan 4: attention to chosen latents with a gate and a sink, between several residual streams.

What goes into a block is a weighted sum of the streams, and what comes out is added to each with a
weight of its own; both weights follow from all streams together:

    hc_fn [2 * streams, streams * width], hc_base [2 * streams], hc_scale [2]
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from qtool.checkpoints.hf_config import Config, count, number
from qtool.formats.gguf_values import Kind, Value, array
from qtool.gguf.architectures import limits, sparse_keys
from qtool.gguf.architectures.indexed import INDEXER, INDEXER_KEYS, is_full, known_start
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.latent_attention import DEFAULTS, KEYS, LATENT_MODULES
from qtool.gguf.architectures.modules import BLOCK, Module, in_blocks, since
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse import CHOICE_BIAS
from qtool.gguf.architectures.sparse_keys import SIGMOID, gating, with_own
from qtool.gguf.from_hf.row_maps import FIRST_HALF, SECOND_HALF, RowMap

_BARE = ((".weight", ""),)
_EVERY = 4  # blocks, of which the second has an indexer, as the very first has


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    blocks = count(config, "num_hidden_layers")
    config["num_key_value_heads"] = count(config, "num_attention_heads")
    if config.get("indexer_types") is None:
        full = [b == 0 or (b - 1) % _EVERY == 0 for b in range(blocks)]
        config["indexer_types"] = ["full" if one else "shared" for one in full]
    return config


def streams(
    at: str, other: str, called: str, *, head: bool = False, mixed: bool = False
) -> Iterator[Module]:
    """The weights of streams; other: how transformers calls where they are, which it saves as
    something between the two."""
    rows = "streams of mixing" if head else "two of the streams of mixing"
    rows = "two of the streams, and streams by streams" if mixed else rows
    scales = "one" if head else "three" if mixed else "two"
    for part, shape in (
        ("fn", (rows, "all streams of mixing")),
        ("base", (rows,)),
        ("scale", (scales,)),
    ):
        theirs = f"{other}.hc_{part}" if head else f"{other}.{part}"
        path = f"{at}_{part}".replace(".hc_pre", "").split(".")
        path.insert(-2, "hc_pre")
        yield Module(
            f"{at}_{part}", also=(theirs, ".".join(path)), called=f"{called}_{part}", ends=_BARE,
            shape=shape,
        )  # fmt: skip


def _experts(part: str, rows: RowMap | None = None) -> Module:
    at = f"{BLOCK}mlp.experts.{'down' if rows is None else 'gate_up'}_proj"
    first = ("width", "inner of experts") if rows is None else ("inner of experts", "width")
    return Module(
        f"{at}.{part}",
        rows and replace(rows, groups="n_routed_experts"),
        within=at,
        called=f"ffn_{part}_exps",
        ends=_BARE,
        each=(f"{BLOCK}mlp.experts.{{i}}.{part}_proj.weight", "n_routed_experts"),
        shape=("experts", *first),
    )


def _saved(module: Module) -> Module:
    """With the name that transformers saves of gates in MLPs."""
    if not module.name.endswith("gate_proj"):
        return module
    return replace(module, also=(module.name.replace("gate_proj", "linear_gate"),))


_AT = BLOCK + "self_attn."
_MODULES = (
    *(_saved(module) for module in LATENT_MODULES if ".experts." not in module.name),
    *CHOICE_BIAS,
    *in_blocks(since("first_k_dense_replace"), (
        _experts("gate", FIRST_HALF), _experts("up", SECOND_HALF), _experts("down"),
    )),
    *in_blocks(is_full, INDEXER),
    Module(_AT + "linear_gate", also=(_AT + "gate_proj",), called="attn_gate",
           shape=("heads of values", "width")),
    Module(_AT + "learnable_sink_param", also=(_AT + "sinks",), called="attn_sinks", ends=_BARE,
           shape=("number of heads",)),
    *streams(BLOCK + "hc_attn_layer.hc_pre.hc", BLOCK + "attn_hc", "hc_attn"),
    *streams(BLOCK + "hc_mlp_layer.hc_pre.hc", BLOCK + "ffn_hc", "hc_ffn"),
    *streams("model.hc_head.hc_head", "model.hc_head", "output_hc", head=True),
)  # fmt: skip


def _unless_one(setting: str) -> Key:
    """Groups of experts, said where there are several."""
    key = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}[setting]
    plain = Key(key, setting)
    return Key(key, setting, lambda config: (
        None if config.get("n_group") == 1 == config.get("topk_group") else plain.value(config)
    ))  # fmt: skip


def _bounds(config: Config) -> Value:
    blocks = count(config, "num_hidden_layers")
    return array(Kind.FLOAT32, [float(np.float32(number(config, "swiglu_limit")))] * blocks)


# How large what goes through an expert's gate may become, for each block.
BOUND = Key("swiglu_clamp_exp", "swiglu_limit", _bounds, listed=True)


def bounded(config: Config) -> str | None:
    given = number(config, "swiglu_limit")
    return None if given > 0 else f"swiglu_limit is {given}, and it bounds nothing then"


def neighbours_there(config: Config) -> str | None:
    return (
        "the class of transformers rotates halves of a head, and llama.cpp neighbours, as the "
        "released checkpoints were trained: results are those of other engines"
    )


def one_epsilon_of_latents(config: Config) -> str | None:
    if number(config, "rms_norm_eps") == 1e-6:
        return None
    return (
        f"rms_norm_eps is {config['rms_norm_eps']}, which llama.cpp adds to the norms of latents "
        "too, where the model adds 1e-6: results differ a little"
    )


_KEYS = with_own(
    KEYS,
    *INDEXER_KEYS,
    _unless_one("n_group"),
    _unless_one("topk_group"),
    gating(SIGMOID),
    sparse_keys.LEADING,
    BOUND,
    Key("hyper_connection.count", "hc_mult"),
    Key("hyper_connection.epsilon", "hc_eps", real=True),
    Key("hyper_connection.magnitude", "hc_magnitude", real=True),
)

HY_V4: dict[str, Architecture] = {
    "HYV4ForCausalLM": Architecture(
        "hy_v4", _MODULES, _KEYS,
        {**DEFAULTS, "first_k_dense_replace": 1, "n_routed_experts": 256, "n_shared_experts": 1,
         "num_experts_per_tok": 8, "moe_intermediate_size": 768, "routed_scaling_factor": 2.827,
         "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "qk_nope_head_dim": 192,
         "v_head_dim": 256, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16,
         "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6, "swiglu_limit": 10.0,
         "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "vocab_size": 120832},
        rope=("default",), names="glm-dsa", needs_head=True, settle=_settle,
        refuse=(limits.no_biases("attention_bias"), limits.dense_first, known_start, bounded),
        warn=(neighbours_there, one_epsilon_of_latents),
    ),
}  # fmt: skip
