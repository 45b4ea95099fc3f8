"""Metadata keys of an architecture and the settings of config.json that they come from.

Kinds and values as convert_hf_to_gguf.py writes them; a key that it forgets, and llama.cpp reads,
is written where llama.cpp's default would be wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qtool.checkpoints.hf_config import (
    Config,
    count,
    head_width,
    layer_types,
    number,
    plain_head_width,
)
from qtool.formats.gguf_values import Kind, Value, array, boolean, f32, string, u32
from qtool.gguf.from_hf.rope_tensors import longrope_attention_factor

Make = Callable[[Config], Value | None]


@dataclass(frozen=True)
class Key:
    """A metadata key: without a `make`, the setting of config.json, left out where it is null."""

    name: str  # after the name of the architecture
    setting: str
    make: Make | None = None
    real: bool = False  # float32, otherwise uint32
    flag: bool = False  # true or false
    listed: bool = False  # may be a list, of one for each block or axis
    lacking: bool = False  # zero stands there for blocks that have none of it

    def value(self, config: Config) -> Value | None:
        if self.make is not None:
            return self.make(config)
        if config.get(self.setting) is None:
            return None
        if self.flag:
            return boolean(bool(config[self.setting]))
        if self.real:
            return f32(number(config, self.setting))
        return u32(0 if config[self.setting] == 0 else count(config, self.setting))


def _rope(config: Config, kind: str = "full_attention") -> Mapping[str, Any]:
    found: Mapping[str, Any] = config["rope_parameters"].get(kind, {})
    return found


def _rope_number(config: Config, name: str, kind: str = "full_attention") -> float | None:
    rope = _rope(config, kind)
    return None if rope.get(name) is None else number(rope, name)


def rope_key(
    key: str, name: str, kind: str = "full_attention", *, unless: float | None = None
) -> Key:
    """A number of the rope settings for a kind of layer; unless: llama.cpp's own default."""

    def make(config: Config) -> Value | None:
        value = _rope_number(config, name, kind)
        return None if value is None or value == unless else f32(value)

    return Key(key, "rope_parameters", make)


_SCALING = {"linear": "linear", "yarn": "yarn", "longrope": "longrope", "su": "longrope"}


def _scaling_type(config: Config) -> Value | None:
    rope = _rope(config)
    name = _SCALING.get(rope["rope_type"])
    if name is None or (name != "longrope" and rope.get("factor") is None):
        return None
    return string(name)


def _scaling(key: str, types: tuple[str, ...], *names: str, whole: bool = False) -> Key:
    """The first of these rope settings that is there, for these types of scaling."""

    def make(config: Config) -> Value | None:
        rope = _rope(config)
        if rope["rope_type"] not in types or rope.get("factor") is None:
            return None
        name = next((name for name in names if rope.get(name) is not None), None)
        if name is None:
            return None
        return u32(count(rope, name)) if whole else f32(number(rope, name))

    return Key(f"rope.scaling.{key}", "rope_parameters", make)


def nonzero(key: str, setting: str) -> Key:
    """A float that is left out where it is zero or null."""

    def make(config: Config) -> Value | None:
        return f32(number(config, setting)) if config.get(setting) else None

    return Key(key, setting, make)


def window_pattern(period: int, *, always: bool = False) -> Key:
    """Which blocks look through a window, left out where it is all but each `period`-th.

    always: said of every model that has windows.
    """

    def make(config: Config) -> Value | None:
        if always and config.get("sliding_window") is None:
            return None
        usual = [(i + 1) % period != 0 for i in range(count(config, "num_hidden_layers"))]
        kinds = layer_types(config)
        windows = [kind == "sliding_attention" for kind in kinds] if kinds else usual
        return None if windows == usual and not always else array(Kind.BOOL, windows)

    return Key("attention.sliding_window_pattern", "layer_types", make, listed=True)


def _window(config: Config) -> Value | None:
    if "sliding_attention" not in (layer_types(config) or ["sliding_attention"]):
        return None
    return u32(count(config, "sliding_window"))


def _rotated(config: Config) -> Value:
    share = _rope_number(config, "partial_rotary_factor")
    return u32(int((1.0 if share is None else share) * plain_head_width(config)))


def _rotated_of_head(config: Config) -> Value:
    return u32(int((_rope_number(config, "partial_rotary_factor") or 1.0) * head_width(config)))


def _attention_factor(config: Config) -> Value | None:
    return f32(longrope_attention_factor(config)) if _rope(config).get("long_factor") else None


SIZES = (
    Key("block_count", "num_hidden_layers"),
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("feed_forward_length", "intermediate_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("attention.head_count_kv", "num_key_value_heads"),
)
RMS = Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", real=True)
EPS = Key("attention.layer_norm_epsilon", "layer_norm_eps", real=True)
HEAD = (Key("attention.key_length", "head_dim"), Key("attention.value_length", "head_dim"))
BASE = rope_key("rope.freq_base", "rope_theta")
BASE_UNLESS_USUAL = rope_key("rope.freq_base", "rope_theta", unless=10000.0)
SCALING = (
    Key("rope.scaling.type", "rope_parameters", _scaling_type),
    _scaling("factor", ("linear", "yarn"), "factor"),
    _scaling("original_context_length", ("yarn",), "original_max_position_embeddings", whole=True),
    _scaling("yarn_ext_factor", ("yarn",), "extrapolation_factor"),
    _scaling("yarn_attn_factor", ("yarn",), "attention_factor", "attn_factor"),
    _scaling("yarn_beta_fast", ("yarn",), "beta_fast"),
    _scaling("yarn_beta_slow", ("yarn",), "beta_slow"),
)
USUAL = (
    *SIZES,
    *SCALING,
    BASE,
    rope_key("rope.freq_base_swa", "rope_theta", "sliding_attention"),
    RMS,
    Key("expert_count", "num_experts"),
    Key("expert_used_count", "num_experts_per_tok"),
    *HEAD,
)
LLAMA = (
    *USUAL,
    Key("vocab_size", "vocab_size"),
    Key("rope.dimension_count", "head_dim", lambda config: u32(head_width(config))),
)
MOE = (*USUAL, Key("expert_feed_forward_length", "moe_intermediate_size"))
GEMMA = (*SIZES, RMS, *HEAD, BASE_UNLESS_USUAL)
GEMMA2 = (
    *GEMMA,
    Key("attn_logit_softcapping", "attn_logit_softcapping", real=True),
    Key("final_logit_softcapping", "final_logit_softcapping", real=True),
    Key("attention.sliding_window", "sliding_window"),
    window_pattern(2),
)
GEMMA3 = (
    *USUAL,
    nonzero("final_logit_softcapping", "final_logit_softcapping"),
    Key("attention.sliding_window", "sliding_window", _window),
    window_pattern(6),
)
ROTATED = Key("rope.dimension_count", "rope_parameters", _rotated)
ROTATED_OF_HEAD = Key("rope.dimension_count", "rope_parameters", _rotated_of_head)
# Said outright where there is none.
SCALING_OR_NONE = Key(
    "rope.scaling.type",
    "rope_parameters",
    lambda config: _scaling_type(config) or string("none"),
)
VOCABULARY = Key("vocab_size", "vocab_size")
WINDOW = Key("attention.sliding_window", "sliding_window")
PHI3 = (
    *SIZES,
    Key("rope.scaling.original_context_length", "original_max_position_embeddings"),
    Key("rope.scaling.attn_factor", "rope_parameters", _attention_factor),
    RMS,
    ROTATED,
    BASE,
    Key(
        "attention.sliding_window",
        "sliding_window",
        lambda config: u32(count(config, "sliding_window") if config["sliding_window"] else 0),
    ),
)
GRANITE = (
    *LLAMA,
    nonzero("attention.scale", "attention_multiplier"),
    nonzero("embedding_scale", "embedding_multiplier"),
    nonzero("residual_scale", "residual_multiplier"),
    nonzero("logit_scale", "logits_scaling"),
)
PARALLEL = (
    *SIZES,
    ROTATED,
    Key(
        "use_parallel_residual",
        "use_parallel_residual",
        lambda config: boolean(bool(config["use_parallel_residual"])),
    ),
    EPS,
    BASE_UNLESS_USUAL,
)
