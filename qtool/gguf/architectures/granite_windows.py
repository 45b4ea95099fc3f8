"""Granite with windows and sinks of attention (GraniteSWA), and the same with experts.

Some blocks may go without rotation; the others share one base to llama.cpp. Gate and up of experts,
and of the shared one, stay in one matrix.
"""

from typing import Any

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.dense import LLAMA
from qtool.gguf.architectures.granite_4 import shared_width, shares
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import BLOCK, MLP, Module, block, in_blocks
from qtool.gguf.architectures.row import LLAMA_ROPE, Architecture

_BARE = ((".weight", ""),)
_MOE, _SHARED = BLOCK + "block_sparse_moe.", BLOCK + "shared_mlp."
_SINKS = Module(
    BLOCK + "self_attn.sinks", ends=_BARE, shape=("number of heads",), called="attn_sinks"
)


def _experts(name: str, called: str, *shape: str) -> Module:
    at = f"{_MOE}experts.{name}"
    return Module(at, within=at, ends=_BARE, called=called, shape=("experts", *shape))


_EXPERTS = (
    Module(_MOE + "router", called="ffn_gate_inp", shape=("experts", "width")),
    _experts("gate_up_proj", "ffn_gate_up_exps", "gate and up of experts", "width"),
    _experts("down_proj", "ffn_down_exps", "width", "inner of experts"),
    *in_blocks(shares, (
        Module(_SHARED + "input_linear", called="ffn_up_shexp",
               shape=("gate and up of the shared MLP", "width")),
        Module(_SHARED + "output_linear", called="ffn_down_shexp",
               shape=("width", "inner of the shared MLP")),
    )),
)  # fmt: skip


def _rotating(config: Config) -> Value | None:
    """Which blocks rotate, left out where all do."""
    which = [bool(theta) for theta in config["layer_rope_theta"]]
    return None if all(which) else array(Kind.BOOL, which)


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """Kinds and bases of all blocks; the base of the first that rotates is that of the model."""
    blocks = count(config, "num_hidden_layers")
    usual = ["sliding_attention" if b % 4 else "full_attention" for b in range(blocks)]
    kinds = layer_types(config) or usual
    rope = config["rope_parameters"]["full_attention"]
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        thetas = [rope["rope_theta"]] * blocks
    if not isinstance(thetas, list) or len(thetas) != blocks:
        raise SettingError("layer_rope_theta", f"is not a list of {blocks} numbers")
    base = next((theta for theta in thetas if theta), rope["rope_theta"])
    own = {"full_attention": {**rope, "rope_theta": base}}
    return {**config, "layer_types": kinds, "layer_rope_theta": thetas, "rope_parameters": own}


def _one_base(config: Config) -> str | None:
    bases = sorted({theta for theta in config["layer_rope_theta"] if theta})
    if len(bases) < 2:
        return None
    return f"blocks rotate with rope_theta {bases[0]} and {bases[1]}, and it has one for all"


_KEYS = (
    *keys.GRANITE,
    keys.WINDOW,
    keys.window_pattern(4, always=True),
    Key("attention.rope_pattern", "", _rotating, listed=True),
)
_DEFAULTS = {
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "logits_scaling": 1.0, "sliding_window": 128, "num_key_value_heads": 4, "vocab_size": 100352,
    "tie_word_embeddings": True,
}  # fmt: skip
_REFUSE = (limits.plain_heads, _one_base)

# fmt: off
GRANITE_WINDOWS: dict[str, Architecture] = {
    "GraniteSWAForCausalLM": Architecture(
        "granite_swa", (*LLAMA, _SINKS, *block(*MLP)), _KEYS, _DEFAULTS,
        rope=LLAMA_ROPE, names="granite", settle=_settled, refuse=_REFUSE,
        warn=(limits.no_dynamic_rope,),
    ),
    "GraniteMoeSWAForCausalLM": Architecture(
        "granite_swa", (*LLAMA, _SINKS, *_EXPERTS),
        (*_KEYS,
         Key("expert_shared_feed_forward_length", "shared_intermediate_size", shared_width)),
        {**_DEFAULTS, "num_key_value_heads": "num_attention_heads", "num_experts": 8,
         "num_experts_per_tok": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
         "shared_intermediate_size": 0, "vocab_size": 32000, "tie_word_embeddings": False},
        rope=LLAMA_ROPE, names="granite", settle=_settled, refuse=_REFUSE,
        warn=(limits.no_dynamic_rope,),
    ),
}
# fmt: on
