"""dots3-note: attention to latents with a gate for each head, of two sizes: of what an indexer has
chosen, or of the tokens in a window. Multi-token prediction is left out.

Latents are multiplied by the root of how much wider the model is; llama.cpp has that in the norms:

    gguf = norm * sqrt(width / latents)
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import limits, sparse_keys
from qtool.gguf.architectures.indexed import INDEXER, INDEXER_COUNTS
from qtool.gguf.architectures.keys import Key, rope_key
from qtool.gguf.architectures.latent_attention import DEFAULTS, KEYS
from qtool.gguf.architectures.modules import BLOCK, OUTER, TWO_NORMS, Module, block, in_blocks
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse import CHOICE_BIAS, LATER_EXPERTS
from qtool.gguf.architectures.sparse_keys import SIGMOID, gating, with_own
from qtool.gguf.from_hf.cuts import Cut
from qtool.gguf.from_hf.value_maps import Floats, ValueMap

_WINDOW = "sliding_attention"
_LOCAL = {
    "num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_EVERY = 4  # blocks, of which the second has no window, as the very first has none


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of blocks with a window under their released names."""
    blocks = count(config, "num_hidden_layers")
    if config.get("layer_types") is None:
        usual = [b < 2 or b % _EVERY == 1 for b in range(blocks)]
        config["layer_types"] = ["full_attention" if one else _WINDOW for one in usual]
    kinds = layer_types(config)
    config["layer_types"] = [k if k == _WINDOW else "full_attention" for k in kinds]
    if config.get("sliding_window_size") is not None:
        config["sliding_window"] = config["sliding_window_size"]
    own = config.get("per_layer_config") or {}
    if not isinstance(own, dict) or not all(isinstance(one, dict) for one in own.values()):
        raise SettingError("per_layer_config", "is not an object of objects")
    found: dict[str, Any] = next(
        (one for b, one in own.items() if kinds[int(b) % blocks] == _WINDOW), {}
    )
    for name, usual_size in _LOCAL.items():
        config.setdefault(f"swa_{name}", found.get(name, config[name] if own else usual_size))
    config.setdefault("num_nextn_predict_layers", 1)  # which config.json does not say
    config["num_key_value_heads"] = count(config, "num_attention_heads")
    return config


def has_window(config: Config, b: int) -> bool:
    kinds = config["layer_types"]
    return b >= len(kinds) or bool(kinds[b] == _WINDOW)


def _has_none(config: Config, b: int) -> bool:
    return not has_window(config, b)


def _grown(setting: str) -> Any:
    def fit(module: Module, config: Config) -> Module:
        wider = np.float32(math.sqrt(count(config, "hidden_size") / count(config, setting)))

        def forward(values: Floats) -> Floats:
            return values * wider

        def inverse(values: Floats) -> Floats:
            return (values.astype(np.float64) / np.float64(wider)).astype(np.float32)

        return replace(module, values=ValueMap(forward, inverse))

    return fit


def _part(at: str, keys: bool) -> Any:
    """Of the matrix that makes keys and values of latents; at: how settings of the kind begin."""

    def fit(module: Module, config: Config) -> Module:
        heads, plain, values = (
            count(config, at + name)
            for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
        )
        both = plain + values
        cut = Cut(heads, both, 0, plain, transposed=True) if keys else Cut(heads, both, plain, both)
        return replace(module, cut=cut)

    return fit


_AT = BLOCK + "self_attn."


def _attention(local: bool) -> tuple[Module, ...]:
    at, word = ("swa_", "local ") if local else ("", "")
    heads = f"number of {word}heads"

    def module(name: str, called: str, *shape: str, within: str = "", fit: Any = None) -> Module:
        inside = _AT + (within or name) if local or within else ""
        return Module(
            _AT + ("local." if local else "") + name, called=called, shape=shape, fit=fit,
            within=inside, blocks=has_window if local else _has_none,
        )  # fmt: skip

    return (
        module("q_b_proj", "attn_q_b", f"{word}queries", "query latents"),
        module("kv_a_proj_with_mqa", "attn_kv_a_mqa", f"{word}latents and rotated keys", "width"),
        module("kv_a_layernorm", "attn_kv_a_norm", f"{word}latents",
               fit=_grown(at + "kv_lora_rank")),
        module("k_b_proj", "attn_k_b", heads, f"{word}latents", f"{word}plain keys",
               within="kv_b_proj", fit=_part(at, keys=True)),
        module("v_b_proj", "attn_v_b", heads, f"{word}head of values", f"{word}latents",
               within="kv_b_proj", fit=_part(at, keys=False)),
        module("g_proj", "attn_gate", heads, "width"),
        module("o_proj", "attn_output", "width", f"{word}heads of values"),
    )  # fmt: skip


_MODULES = (
    *OUTER,
    *block(*TWO_NORMS),
    Module(_AT + "q_a_proj", shape=("query latents", "width")),
    Module(_AT + "q_a_layernorm", shape=("query latents",), fit=_grown("q_lora_rank")),
    Module(_AT + "k_rope_only_layernorm", called="attn_k_norm", shape=("rotated keys",)),
    *_attention(local=False),
    *_attention(local=True),
    *in_blocks(_has_none, INDEXER),
    *LATER_EXPERTS,
    *CHOICE_BIAS,
)


def _heads(config: Config) -> Value:
    blocks = range(count(config, "num_hidden_layers"))
    own, local = (count(config, f"{at}num_attention_heads") for at in ("", "swa_"))
    return array(Kind.INT32, [local if has_window(config, b) else own for b in blocks])


def _kinds(window: bool) -> Any:
    def make(config: Config) -> Value:
        blocks = range(count(config, "num_hidden_layers"))
        return array(Kind.BOOL, [has_window(config, b) is window for b in blocks])

    return make


def _sum(*settings: str) -> Any:
    return lambda config: u32(sum(count(config, name) for name in settings))


def _one_size(config: Config) -> str | None:
    for name in ("q_lora_rank", "qk_rope_head_dim"):
        own, local = config.get(name), config[f"swa_{name}"]
        if own != local:
            return f"{name} is {own} and {local} in blocks with a window, and it has one"
    shared = config.get("moe_shared_expert_intermediate_size")
    shared = shared or config.get("shared_experts_intermediate_size")
    if shared not in (None, config["moe_intermediate_size"]):
        return f"shared experts are {shared} wide, and it takes them as wide as the others"
    return None


def _known_kinds(config: Config) -> str | None:
    if config.get("use_dsa") is False:
        return "use_dsa is false, and it has an indexer in each block without a window"
    if config.get("apply_mla_qkv_lora_rescale") is False:
        return "apply_mla_qkv_lora_rescale is false, and the class takes true"
    return None


def _halves_there(config: Config) -> str | None:
    top = count(config, "index_topk")
    if top >= count(config, "max_position_embeddings"):
        return None
    return (
        f"beyond {top} tokens llama.cpp chooses by rotating halves of an indexer's keys, where the "
        "class rotates neighbours: attention may see other tokens there"
    )


_KEYS = with_own(
    KEYS,
    *INDEXER_COUNTS,
    rope_key("rope.freq_base_swa", "rope_theta", _WINDOW),
    Key("attention.head_count", "num_attention_heads", _heads, listed=True),
    Key("attention.sliding_window", "sliding_window"),
    Key("attention.sliding_window_pattern", "layer_types", _kinds(True), listed=True),
    Key("attention.kv_lora_rank_swa", "swa_kv_lora_rank"),
    Key("attention.key_length_swa", "", _sum("swa_kv_lora_rank", "swa_qk_rope_head_dim")),
    Key("attention.value_length_swa", "", _sum("swa_kv_lora_rank")),
    Key("attention.key_length_mla_swa", "", _sum("swa_qk_nope_head_dim", "swa_qk_rope_head_dim")),
    Key("attention.value_length_mla_swa", "swa_v_head_dim"),
    Key("attention.indexer.types", "layer_types", _kinds(False), listed=True),
    gating(SIGMOID),
    sparse_keys.LEADING,
)

DOTS3_NOTE: dict[str, Architecture] = {
    name: Architecture(
        "dots3note", _MODULES, _KEYS,
        {**DEFAULTS, "q_lora_rank": 1024, "first_k_dense_replace": 1, "n_routed_experts": 256,
         "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
         "routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
         "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64, "sliding_window": 512,
         "rms_norm_eps": 1e-5, "rope_theta": 8e7, "rope_local_base_freq": 5e4,
         "max_position_embeddings": 524288, "vocab_size": 152064},
        rope=("default",), names="glm-dsa", settle=_settle,
        refuse=(limits.no_biases("attention_bias", "mlp_bias"), limits.dense_first,
                limits.one_group, _one_size, _known_kinds,
                limits.taken(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))),
        warn=(_halves_there,),
    )
    for name in ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration")
}  # fmt: skip
