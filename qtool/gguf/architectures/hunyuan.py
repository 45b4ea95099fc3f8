"""Hunyuan: a rope scaling that calls itself dynamic, and is a larger base once for all, which
llama.cpp is told, or of multimodal models, makes itself.

Of models with experts config.json may say some numbers for each block; llama.cpp has one of each.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, head_width, number
from qtool.errors import SettingError
from qtool.formats.gguf_values import Value, f32, string, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import MLP, OUTER, TWO_NORMS, attention, block, experts
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sections import IF_SAID
from qtool.gguf.architectures.sparse_keys import with_own


def _rope(config: Config) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config["rope_parameters"]["full_attention"]
    return found


def _if_stretched(key: str, value: Callable[[Config], Value]) -> Key:
    def make(config: Config) -> Value | None:
        rope = config["rope_parameters"]["full_attention"]
        return value(config) if rope["rope_type"] == "dynamic" else None

    return Key(key, "rope_parameters", make)


def _stretched_base(config: Config) -> Value:
    rope, width = config["rope_parameters"]["full_attention"], head_width(config)
    return f32(number(rope, "rope_theta") * number(rope, "alpha") ** (width / (width - 2)))


# The lengths that its checkpoints say are shorter than what this base is for.
_STRETCHED_LENGTH = 256 * 1024
_STRETCHED = (
    _if_stretched("context_length", lambda _: u32(_STRETCHED_LENGTH)),
    _if_stretched("rope.freq_base", _stretched_base),
    _if_stretched("rope.scaling.type", lambda _: string("none")),
    _if_stretched("rope.scaling.factor", lambda _: f32(1.0)),
    _if_stretched("rope.scaling.original_context_length", lambda _: u32(_STRETCHED_LENGTH)),
)
_OF_VISION = (
    _if_stretched("rope.scaling.alpha", lambda config: f32(number(_rope(config), "alpha"))),
    _if_stretched("rope.scaling.type", lambda _: string("none")),
    _if_stretched("rope.scaling.factor", lambda config: f32(
        1.0 if _rope(config).get("factor") is None else number(_rope(config), "factor"))),
    _if_stretched("rope.scaling.original_context_length", lambda config: u32(
        count(config, "max_position_embeddings"))),
    IF_SAID,
)  # fmt: skip
_BY_BLOCK = ("moe_topk", "moe_intermediate_size", "num_shared_expert")


def _in_all_blocks(config: Config, setting: str) -> int:
    """A setting that may be a list with a number for each block."""
    given = config.get(setting)
    if given is None and setting != "moe_topk":  # the class has no such settings
        return 1 if setting == "num_shared_expert" else count(config, "intermediate_size")
    if isinstance(given, list):
        if len(given) < count(config, "num_hidden_layers"):
            raise SettingError(setting, f"is a list of {len(given)} numbers")
        return count({setting: given[0]}, setting)
    return count(config, setting)


def _key(name: str, setting: str) -> Key:
    return Key(name, setting, lambda config: u32(_in_all_blocks(config, setting)))


def _one_for_all(config: Config) -> str | None:
    for setting in _BY_BLOCK:
        given = config.get(setting)
        if isinstance(given, list) and any(one != given[0] for one in given):
            return f"{setting} differs from block to block, and it takes one for all"
    inner, own = count(config, "intermediate_size"), _in_all_blocks(config, "moe_intermediate_size")
    if own == inner:
        return None
    return f"experts are {own} wide, and it takes intermediate_size ({inner}) for that"


def _as_named_now(config: dict[str, Any]) -> dict[str, Any]:
    """Released checkpoints say some settings under names of their own, and that there is one expert
    where there are none."""
    rope = _rope(config)
    if rope["rope_type"] == "xdrope":
        given = {name: value for name, value in rope.items() if name != "xdrope_section"}
        sections = rope.get("xdrope_section") or rope.get("mrope_section")
        rope = {**given, "rope_type": "dynamic", "mrope_section": sections}
    if isinstance(listed := rope.get("mrope_section"), list):
        whole = [int(one) if isinstance(one, float) and one.is_integer() else one for one in listed]
        rope = {**rope, "mrope_section": whole}
    config["rope_parameters"] = {"full_attention": rope}
    if config.get("head_dim") is None and config.get("attention_head_dim") is not None:
        config["head_dim"] = config["attention_head_dim"]
    if config.get("num_experts") == 1:
        del config["num_experts"]
    return config


def _fourth_section(config: Config) -> str | None:
    given = _rope(config).get("mrope_section")
    if not isinstance(given, list) or len(given) < 4 or not given[3]:
        return None
    return (
        f"mrope_section is {given}, and llama.cpp does not rotate the fourth of these sections "
        "between tokens of text: long texts give slightly other results there"
    )


_AROUND = (
    *OUTER,
    *attention(),
    *block(*TWO_NORMS, "self_attn.query_layernorm", "self_attn.key_layernorm"),
)
_WIDTHS = {"down_proj": ("width", "inner")}
_EXPERTS = tuple(
    replace(m, shape=("experts", *_WIDTHS.get(m.name.rpartition(".")[2], ("inner", "width"))))
    for m in experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
)
_GATE = tuple(replace(m, shape=("experts", "width")) for m in block("mlp.gate.wg"))
_DEFAULTS = {
    "num_key_value_heads": "num_attention_heads", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
_REFUSE = (limits.no_biases("attention_bias"), limits.alpha_of_dynamic_rope)

# fmt: off
HUNYUAN: dict[str, Architecture] = {
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan-dense", (*_AROUND, *block(*MLP)), (*keys.USUAL, *_STRETCHED), _DEFAULTS,
        refuse=_REFUSE, warn=(),
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan-moe",
        (*_AROUND, *_GATE, *_EXPERTS,
         *block(*(name.replace("mlp.", "mlp.shared_mlp.") for name in MLP))),
        (*with_own(
            keys.USUAL,
            _key("expert_used_count", "moe_topk"),
            Key("expert_shared_feed_forward_length", "",
                lambda config: u32(count(config, "intermediate_size"))),
            _key("expert_feed_forward_length", "moe_intermediate_size"),
            _key("expert_shared_count", "num_shared_expert"),
         ), *_STRETCHED),
        {**_DEFAULTS, "num_experts": 1, "moe_topk": 1},
        refuse=(*_REFUSE, _one_for_all), warn=(),
    ),
    "HunYuanVLForConditionalGeneration": Architecture(
        "hunyuan_vl", (*_AROUND, *block(*MLP)), with_own(keys.USUAL, *_OF_VISION),
        {**_DEFAULTS, "vocab_size": 290943, "tie_word_embeddings": True},
        alone="HunYuanDenseV1ForCausalLM", settle=_as_named_now,
        refuse=_REFUSE, warn=(_fourth_section,),
    ),
}
# fmt: on
