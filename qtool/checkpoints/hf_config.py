"""config.json with what transformers fills in: defaults, the text part, one form of rope settings.

Checkpoints spell the same thing in several ways (rope_scaling and rope_theta, or rope_parameters;
num_local_experts or num_experts), and leave out what equals the default of their class. Source: the
configuration classes of transformers 5.
"""

from collections.abc import Mapping
from typing import Any

from qtool.errors import SettingError
from qtool.messages.printable import in_json

Config = Mapping[str, Any]
# Where completed settings have what differs from block to block: for each, the settings it changes.
BY_BLOCK = "by_block"
WIDTH_BY_HEADS = "hidden_size / num_attention_heads"
FOUR_WIDTHS = "4 * hidden_size"
# What wrappers call the settings of the decoder inside, the outermost first.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_OLD_NAMES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "num_experts": ("num_local_experts",),
    "num_experts_per_tok": ("num_experts_per_token",),
    "tie_word_embeddings": ("tie_embedding",),
    "rms_norm_eps": ("layernorm_epsilon",),
    "rope_local_base_freq": ("swa_rope_theta",),
    "layer_norm_eps": ("norm_eps", "norm_epsilon", "layer_norm_epsilon"),
}
_FULL = ("full_attention", "indexed_attention")
_NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope", "su")
# How config.json called what is a part of rope_parameters now.
_ROPE_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}


def text_settings(raw: Config) -> Config:
    """The object with the settings of the language model, {} where they lie outermost."""
    for name in TEXT_CONFIGS:
        inner = raw.get(name)
        if isinstance(inner, Mapping):
            return text_settings(inner) or inner
    return {}


def text_part(raw: Config) -> dict[str, Any]:
    """The settings of the language model: those in text_config count before those around them."""
    inner = text_settings(raw)
    if not inner:
        return dict(raw)
    tied = [part["tie_word_embeddings"] for part in (raw, inner) if "tie_word_embeddings" in part]
    # transformers takes the one outside, which older ones did not write. A head that is stored and
    # differs from the embedding counts in any case.
    return {**raw, **inner, **({"tie_word_embeddings": any(tied)} if tied else {})}


def complete(raw: Config, defaults: Config) -> dict[str, Any]:
    """Settings under their present names, with `defaults` for what is not said at all.

    A default that is a string names the setting that stands in when there is none or null.
    rope_parameters gets the one form {full_attention: {...}, sliding_attention: {...}}.
    """
    config = text_part(raw)
    for name, older in _OLD_NAMES.items():
        for old in older:
            if old in config:
                config.setdefault(name, config[old])
    if isinstance(kinds := config.get("layers_block_type"), list):
        config.setdefault("num_hidden_layers", len(kinds))
    if isinstance(mlps := config.get("mlp_layer_types"), list):
        leading = next((b for b, kind in enumerate(mlps) if kind != "dense"), len(mlps))
        config.setdefault("first_k_dense_replace", leading)
    for name, default in defaults.items():
        if name.startswith("rope_"):
            continue
        if isinstance(default, str):
            if config.get(name) is None:
                config[name] = _derived(config, default)
        else:
            config.setdefault(name, default)
    config["rope_parameters"] = _rope(config, defaults)
    return config


def of_block(config: Config, block: int) -> Config:
    """The settings as one block has them, of settings that are complete."""
    differing = config.get(BY_BLOCK)
    return {**config, **differing[block]} if differing and block < len(differing) else config


def _derived(config: Config, name: str) -> Any:
    if name == FOUR_WIDTHS:
        return 4 * count(config, "hidden_size")
    return plain_head_width(config) if name == WIDTH_BY_HEADS else count(config, name)


def _rope(config: Config, defaults: Config) -> dict[str, dict[str, Any]]:
    """Rope settings by kind of layer; sliding_attention only where it has its own."""
    said = config.get("rope_scaling") or config.get("rope_parameters")
    given = said or defaults.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise SettingError("rope_parameters", f"is {in_json(given)}, expected an object")
    by_kind = {k: v for k, v in given.items() if k.endswith("_attention") and v is not None}
    if any(not isinstance(v, Mapping) for v in by_kind.values()):
        raise SettingError("rope_parameters", "of a layer type is not an object")
    full = dict(next((by_kind[k] for k in _FULL if k in by_kind), {} if by_kind else given))
    found = {"full_attention": _filled(full, config, defaults)}
    local = by_kind.get("sliding_attention")
    if local is not None or "rope_local_base_freq" in defaults:
        own = dict(local or {})
        base = config.get("rope_local_base_freq", defaults.get("rope_local_base_freq", 10000.0))
        own.setdefault("rope_theta", base)
        own.setdefault("rope_type", own.get("type", "default"))
        found["sliding_attention"] = own
    return found


def _filled(rope: dict[str, Any], config: Config, defaults: Config) -> dict[str, Any]:
    for name, older in _ROPE_NAMES.items():
        outside = next((config[old] for old in older if config.get(old) is not None), None)
        if outside is None:
            outside = defaults.get("rope_" + name.removeprefix("rope_"))
        if outside is not None:
            rope.setdefault(name, outside)
    rope.setdefault("rope_type", rope.get("type", "default"))
    original = config.get("original_max_position_embeddings")
    if original is not None and rope["rope_type"] in _NEEDS_ORIGINAL_LENGTH:
        rope["original_max_position_embeddings"] = original
    elif rope["rope_type"] in _NEEDS_ORIGINAL_LENGTH:
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def _said(config: Config, name: str) -> str:
    said = in_json(config[name]) if name in config else "not there"
    return f"is {said}"


def count(config: Config, name: str) -> int:
    """A setting that counts something, at least one; SourceError for anything else."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise SettingError(name, f"{_said(config, name)}, expected a positive integer")
    return value


def number(config: Config, name: str) -> float:
    """A setting that is a number; SourceError for anything else."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise SettingError(name, f"{_said(config, name)}, expected a number")
    return float(value)


def integers(config: Config, name: str) -> list[int]:
    """A setting that lists integers, [] where it is null; SourceError for anything else."""
    given = config.get(name)
    if given is None:
        return []
    if not isinstance(given, list) or not all(type(one) in (int, bool) for one in given):
        raise SettingError(name, f"{_said(config, name)}, expected a list of integers")
    return [int(one) for one in given]


def layer_types(config: Config) -> list[str]:
    """What each block's attention sees, [] where config.json does not say."""
    given = config.get("layer_types")
    blocks = count(config, "num_hidden_layers")
    if given is None:
        if config.get("sliding_window_pattern") is None:
            return []
        period = count(config, "sliding_window_pattern")
        return [f"{'sliding' if (i + 1) % period else 'full'}_attention" for i in range(blocks)]
    if not isinstance(given, list) or len(given) != blocks:
        raise SettingError("layer_types", f"is not a list of {blocks} names")
    return [str(kind) for kind in given]


def plain_head_width(config: Config) -> int:
    """The width divided by the heads, which is what most heads are wide."""
    return count(config, "hidden_size") // count(config, "num_attention_heads")


def head_width(config: Config) -> int:
    """Elements of a head of the attention."""
    return plain_head_width(config) if config.get("head_dim") is None else count(config, "head_dim")
