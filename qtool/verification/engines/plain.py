"""Settings that every version of transformers takes, told without it: loading it takes seconds.

Of the decoders that most artifacts are of, by names and values; whatever is not among these
transformers is asked. Source: transformers 5.24 (models/llama, mistral, qwen2, qwen3; generation).
"""

from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_COUNTS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "pretraining_tp",
})  # fmt: skip
_SHARES = frozenset({"initializer_range", "attention_dropout", "rms_norm_eps"})
_SWITCHES = frozenset({"attention_bias", "mlp_bias", "tie_word_embeddings", "use_cache"})
_IDS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
_WORDS = frozenset({"transformers_version", "_name_or_path"})
_DTYPES = ("float16", "bfloat16", "float32")


def reads(config: Mapping[str, Any]) -> bool:
    """Whether a config.json has nothing that a class of transformers might have something against;
    of its quantization_config other checks tell."""
    if config.get("model_type") not in TYPES:
        return False
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not (_is_count(width) and _is_count(heads)) or int(width or 0) % int(heads or 1):
        return False
    return all(_is_plain(key, value) for key, value in config.items())


def _is_plain(key: str, value: Any) -> bool:
    if key in _COUNTS:
        return _is_count(value)
    if key in _SHARES:
        return isinstance(value, float) and 0 <= value <= 1
    if key in _SWITCHES:
        return isinstance(value, bool)
    if key in _IDS:
        return value is None or _is_id(value)
    if key in ("dtype", "torch_dtype"):
        return value in _DTYPES
    if key == "rope_theta":
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if key == "rope_scaling":
        return value is None
    if key == "hidden_act":
        return bool(value == "silu")
    if key == "architectures":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if key in _WORDS:
        return isinstance(value, str)
    return key in ("model_type", "quantization_config")


def draws(said: Mapping[str, Any]) -> bool:
    """The same of a generation_config.json, of which another check has seen what it draws with."""
    return all(
        value is None or _is_id(value) or (isinstance(value, list) and all(map(_is_id, value)))
        if key in _IDS
        else isinstance(value, str)
        if key in _WORDS
        else isinstance(value, bool)
        if key in ("do_sample", "_from_model_config")
        else key in ("temperature", "top_p", "top_k") and isinstance(value, int | float)
        for key, value in said.items()
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31
