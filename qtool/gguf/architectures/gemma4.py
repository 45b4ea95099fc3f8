"""Gemma 4: blocks that look through a window, and now and then one that sees all of the text with
wider heads, of which the first share of each is rotated.

Beyond that, some have values that are the keys (31B), experts beside the MLP (26B-A4B), or an
embedding for each block and last blocks that read the keys and values of earlier ones (E2B, E4B).
Sizes that differ from block to block are in BY_BLOCK of the completed settings.
"""

from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import BY_BLOCK, Config, count, layer_types
from qtool.gguf.architectures import limits
from qtool.gguf.architectures.gemma4_keys import KEYS, full_block, window_block
from qtool.gguf.architectures.modules import BLOCK, FOUR_NORMS, MLP, OUTER, Module, Where, block
from qtool.gguf.architectures.row import GELU, Architecture

_EVERY = 6  # blocks, of which the last has no window, unless config.json says otherwise
_HEAD = 512  # elements of a head of those without
_BARE = ((".weight", ""),)
_SCALE = ((".scale", ""),)


def shares(config: Config, b: int) -> bool:
    """Whether a block reads the keys and values of an earlier one."""
    given = config.get("num_kv_shared_layers")
    shared = count(config, "num_kv_shared_layers") if given else 0
    return b >= count(config, "num_hidden_layers") - shared


def _own_keys(config: Config, b: int) -> bool:
    return not shares(config, b)


def _own_values(config: Config, b: int) -> bool:
    as_keys = config.get("attention_k_eq_v") and layer_types(config)[b] == "full_attention"
    return not shares(config, b) and not as_keys


def settle(config: dict[str, Any]) -> dict[str, Any]:
    """The settings as the class of transformers makes them of what config.json says."""
    blocks = count(config, "num_hidden_layers")
    usual = ["full" if (b + 1) % _EVERY == 0 else "sliding" for b in range(blocks)]
    kinds = layer_types(config) or [f"{kind}_attention" for kind in usual]
    kinds[-1] = "full_attention"
    config["layer_types"] = kinds
    if not config.get("enable_moe_block"):
        config["num_experts"] = None
    full = config["rope_parameters"]["full_attention"]
    if full["rope_type"] == "default":  # all of a head is rotated
        full |= {"rope_type": "proportional", "partial_rotary_factor": 1.0}
    config[BY_BLOCK] = [_changed(config, b) for b in range(blocks)]
    return config


def _changed(config: Config, b: int) -> dict[str, Any]:
    """What is said of a block beside that of all."""
    given, found = config.get("per_layer_config"), {}
    if isinstance(given, dict):
        own = given.get(str(b))
        found = dict(own) if isinstance(own, dict) else {}
    elif config["layer_types"][b] == "full_attention":
        found = {"head_dim": config.get("global_head_dim") or _HEAD}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            found["num_key_value_heads"] = config["num_global_key_value_heads"]
    if config.get("use_double_wide_mlp") and shares(config, b):
        found["intermediate_size"] = 2 * count(config, "intermediate_size")
    return found


def _asked(setting: str, *modules: Module) -> tuple[Module, ...]:
    return tuple(replace(module, asked=setting) for module in modules)


def _own(where: Where, name: str) -> Module:
    """What is of no use in the blocks that share; released checkpoints have it there."""
    return Module(BLOCK + name, blocks=where, unread=shares)


_INPUTS = "hidden_size_per_layer_input"
_MODULES = (
    *OUTER,
    *block("self_attn.q_proj", "self_attn.o_proj", "self_attn.q_norm", *FOUR_NORMS, *MLP),
    _own(_own_keys, "self_attn.k_proj"),
    _own(_own_keys, "self_attn.k_norm"),
    _own(_own_values, "self_attn.v_proj"),
    Module(BLOCK + "layer_scalar", needed=False, ends=_BARE, shape=("one",)),
    *_asked(
        "enable_moe_block",
        Module(BLOCK + "router.proj", shape=("experts", "width")),
        Module(BLOCK + "router.scale", ends=_SCALE, called="ffn_gate_inp", shape=("width",)),
        Module(
            BLOCK + "router.per_expert_scale",
            ends=_SCALE,
            called="ffn_down_exps",
            shape=("experts",),
        ),
        Module(
            BLOCK + "experts.gate_up_proj",
            within=BLOCK + "experts.gate_up_proj",
            each=(BLOCK + "experts.{i}.{gate,up}_proj.weight", "num_experts"),
            ends=_BARE,
            shape=("experts", "gate and up of experts", "width"),
        ),
        Module(
            BLOCK + "experts.down_proj",
            within=BLOCK + "experts.down_proj",
            each=(BLOCK + "experts.{i}.down_proj.weight", "num_experts"),
            ends=_BARE,
        ),
        *(
            Module(f"{BLOCK}{name}", shape=("width",))
            for name in (
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
        ),
    ),
    *_asked(
        _INPUTS,
        Module("model.embed_tokens_per_layer", shape=("vocabulary", "inputs of all blocks")),
        Module("model.per_layer_model_projection", shape=("inputs of all blocks", "width")),
        Module("model.per_layer_projection_norm", shape=("input of a block",)),
        Module(BLOCK + "per_layer_input_gate", shape=("input of a block", "width")),
        Module(BLOCK + "per_layer_projection", shape=("width", "input of a block")),
        *block("post_per_layer_input_norm"),
    ),
)


def _blocks_in_turn(config: Config) -> str | None:
    """llama.cpp stops without windows, and blocks that share read the last two that do not."""
    kinds, blocks = layer_types(config), count(config, "num_hidden_layers")
    if odd := set(kinds) - {"sliding_attention", "full_attention"}:
        return f"layer_types names {min(odd)}, and it knows sliding_attention and full_attention"
    if "sliding_attention" not in kinds:
        return "no block looks through a window, and it asks for some"
    own = [kind for b, kind in enumerate(kinds) if not shares(config, b)]
    if len(own) < blocks and own[-2:] != ["sliding_attention", "full_attention"]:
        return (
            f"the last {blocks - len(own)} blocks share keys and values, and it expects two blocks "
            "before them of which the first has a window and the second none"
        )
    return None


def _one_size_of_each(config: Config) -> str | None:
    """Heads are of two sizes there, and only they and the MLP differ."""
    for b, kind in enumerate(layer_types(config)):
        own = config[BY_BLOCK][b]
        if odd := set(own) - {"head_dim", "num_key_value_heads", "intermediate_size"}:
            return f"per_layer_config changes {min(odd)}, and it has one for all blocks"
        like = full_block(config) if kind == "full_attention" else window_block(config)
        for name in ("head_dim", "num_key_value_heads"):
            mine = own.get(name, config.get(name))
            if mine != like.get(name):
                return (
                    f"{name} is {mine} in block {b} and {like.get(name)} in others of its kind, "
                    "and it has one for each kind"
                )
    return None


def _causal(config: Config) -> str | None:
    if config.get("use_bidirectional_attention") != "all":
        return None
    return "use_bidirectional_attention is all, and it looks back only"


def _rotations(config: Config) -> str | None:
    local = config["rope_parameters"]["sliding_attention"]["rope_type"]
    if local == "default":
        return None
    return f"blocks with windows rotate with scaling of the type {local}, and it scales none"


def _one_vocabulary(config: Config) -> str | None:
    given = config.get("vocab_size_per_layer_input")
    if not config.get(_INPUTS) or given == config.get("vocab_size"):
        return None
    return (
        f"vocab_size_per_layer_input is {given}, and it has as many inputs of blocks as tokens "
        f"({config.get('vocab_size')})"
    )


# fmt: off
_ROW = Architecture(
    "gemma4", _MODULES, KEYS,
    {"vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
     "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
     "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 512,
     "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
     "attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
     "enable_moe_block": False, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
     "rope_parameters": {
         "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                            "rope_theta": 1e6},
         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
     "tie_word_embeddings": True},
    activations=GELU, rope=("proportional",), settle=settle,
    refuse=(limits.no_biases("attention_bias"), _blocks_in_turn, _one_size_of_each, _causal,
            _rotations, _one_vocabulary),
    warn=(),
)
# Its blocks have no inputs of their own, and no experts.
_UNIFIED = replace(_ROW, defaults={
    **{name: value for name, value in _ROW.defaults.items()
       if name not in ("vocab_size_per_layer_input", _INPUTS, "enable_moe_block")},
    "max_position_embeddings": 262144, "sliding_window": 1024,
})

GEMMA4: dict[str, Architecture] = {
    "Gemma4ForCausalLM": _ROW,
    "Gemma4ForConditionalGeneration": _ROW,
    "Gemma4UnifiedForConditionalGeneration": _UNIFIED,
}
# fmt: on
