"""Laguna: experts, and attention that a gate closes for each head, or for each of its elements.

Blocks may differ in the number of heads, and most look through a window in some models.
"""

from typing import Any

from qtool.checkpoints.hf_config import BY_BLOCK, Config, count, layer_types, number, of_block
from qtool.formats.gguf_values import Kind, Value, array, boolean, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.dense import QWEN
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    QK_NORMS,
    Module,
    before,
    block,
    experts,
    in_blocks,
    since,
)
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import SIGMOID, gating, with_own

_LEADING = "first_k_dense_replace"
_HEADS = "num_attention_heads_per_layer"
_PERIOD = 4  # blocks, of which the first has no window, where a file says nothing


def usual_windows(blocks: int) -> list[bool]:
    """Which blocks llama.cpp takes for those with a window."""
    return [b % _PERIOD != 0 for b in range(blocks)]


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    blocks = count(config, "num_hidden_layers")
    config["layer_types"] = layer_types(config) or ["full_attention"] * blocks
    if config.get(_HEADS) is not None:
        limits.listed(config, _HEADS, blocks)
        config[BY_BLOCK] = [{"num_attention_heads": heads} for heads in config[_HEADS]]
    return config


def _heads(config: Config) -> Value:
    blocks = range(count(config, "num_hidden_layers"))
    return array(Kind.INT32, [count(of_block(config, b), "num_attention_heads") for b in blocks])


def _windows(config: Config) -> list[bool]:
    return [kind == "sliding_attention" for kind in layer_types(config)]


def _window(config: Config) -> Value | None:
    return u32(count(config, "sliding_window")) if any(_windows(config)) else None


def _pattern(config: Config) -> Value | None:
    windows = _windows(config)
    if not any(windows) or windows == usual_windows(len(windows)):
        return None
    return array(Kind.BOOL, windows)


def _rotated(config: Config, kind: str) -> Value:
    rope = config["rope_parameters"][kind]
    given = rope.get("partial_rotary_factor") is not None
    share = number(rope, "partial_rotary_factor") if given else 1.0
    return u32(int(count(config, "head_dim") * share))


def _rotated_full(config: Config) -> Value:
    return _rotated(config, "full_attention")


def _rotated_local(config: Config) -> Value:
    return _rotated(config, "sliding_attention")


def per_element(gating: Any) -> bool:
    """Whether a gate has a number for each element of a head."""
    return isinstance(gating, str) and gating.replace("_", "-") == "per-element"


def _one_gate(config: Config) -> str | None:
    given, of_blocks = config.get("gating"), config.get("gating_types") or []
    if given is not True and str(given).replace("_", "-") not in ("per-head", "per-element"):
        return f"gating is {given}, and it has a gate for each head, or for each of its elements"
    if all(per_element(one) is per_element(given) for one in of_blocks):
        return None
    return f"gating_types says of some blocks what gating ({given}) does not"


def _plain_windows(config: Config) -> str | None:
    local = config["rope_parameters"]["sliding_attention"]["rope_type"]
    return None if local == "default" else f"blocks with windows have rope scaling {local}"


def _rotation_of_first(config: Config) -> str | None:
    full, local = (make(config) for make in (_rotated_full, _rotated_local))
    if full == local or all(_windows(config)) or not _windows(config)[0]:
        return None
    return (
        f"the first block looks through a window and rotates {local.value} elements of a head, "
        f"which it then does in all blocks; those without a window rotate {full.value}"
    )


def _no_softcap(config: Config) -> str | None:
    given = config.get("moe_router_logit_softcapping")
    return f"moe_router_logit_softcapping is {given}, and it takes 0" if given else None


_MODULES = (
    *QWEN,
    *block(*QK_NORMS),
    Module(BLOCK + "self_attn.g_proj", called="attn_gate", shape=("gates", "width")),
    *in_blocks(before(_LEADING), block(*MLP)),
    *in_blocks(since(_LEADING), (
        *block("mlp.gate"),
        Module(BLOCK + "mlp.experts.e_score_correction", called="exp_probs_b",
               also=(BLOCK + "mlp.gate.e_score_correction",), ends=((".bias", "_bias"),),
               shape=("experts", "one")),
        *experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
        *(Module(BLOCK + name.replace("mlp.", "mlp.shared_expert."),
                 also=(BLOCK + name.replace("mlp.", "mlp.shared_experts."),),
                 called=f"ffn_{name[4:].removesuffix('_proj')}_shexp") for name in MLP),
    )),
)  # fmt: skip
_KEYS = with_own(
    keys.MOE,
    keys.VOCABULARY,
    Key("attention.head_count", "num_attention_heads", _heads, listed=True),
    Key("attention.sliding_window", "sliding_window", _window),
    Key("attention.sliding_window_pattern", "layer_types", _pattern, listed=True),
    Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    Key("expert_weights_norm", "", lambda _: boolean(True), flag=True),
    Key("expert_weights_scale", "moe_routed_scaling_factor", real=True),
    gating(SIGMOID),
    sparse_keys.LEADING,
    Key("rope.dimension_count", "rope_parameters", _rotated_full),
    Key("rope.dimension_count_swa", "rope_parameters", _rotated_local),
)

LAGUNA: dict[str, Architecture] = {
    "LagunaForCausalLM": Architecture(
        "laguna", _MODULES, _KEYS,
        {"num_key_value_heads": 8, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "gating": True,
         "first_k_dense_replace": 1, "moe_routed_scaling_factor": 1.0, "sliding_window": 512,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "vocab_size": 100352,
         "rope_theta": 5e5, "rope_local_base_freq": 1e4,
         "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        rope=("default", "yarn"), names="dots1", settle=_settle,
        refuse=(limits.dense_first, limits.no_biases("attention_bias"), _one_gate,
                _plain_windows, _rotation_of_first, _no_softcap,
                limits.taken(("moe_apply_router_weight_on_input", False))),
        warn=(),
    ),
}  # fmt: skip
