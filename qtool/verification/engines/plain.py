"""Settings that every version of transformers takes, told without it: loading it takes seconds.

Of the decoders that most artifacts are of, by names and values; whatever is not among these
transformers is asked. Source: transformers 5.24 (models/llama, mistral, qwen2, qwen3; generation).
"""

from collections.abc import Callable, Mapping
from typing import Any

from qtool.verification.unlike_settings import is_number

TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_DTYPES = ("float16", "bfloat16", "float32")


def reads(config: Mapping[str, Any]) -> bool:
    """Whether a config.json has nothing that a class of transformers might have something against;
    of its quantization_config other checks tell."""
    return (
        config.get("model_type") in TYPES
        and {"hidden_size", "num_attention_heads"} <= config.keys()
        and _all_plain(config, _SETTINGS)
        and config["hidden_size"] % config["num_attention_heads"] == 0
    )


def draws(said: Mapping[str, Any]) -> bool:
    """The same of a generation_config.json, of which another check has seen what it draws with."""
    return _all_plain(said, _DRAWN)


def _all_plain(said: Mapping[str, Any], plain: "Mapping[str, Plain]") -> bool:
    return all(key in plain and plain[key](value) for key, value in said.items())


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 1


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_dtype(value: Any) -> bool:
    return value in _DTYPES


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_word, value))


def _are_ids(value: Any) -> bool:
    return value is None or _is_id(value) or (isinstance(value, list) and all(map(_is_id, value)))


Plain = Callable[[Any], bool]
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SETTINGS: Mapping[str, Plain] = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
         "pretraining_tp"), _is_count),
    **dict.fromkeys(("initializer_range", "attention_dropout", "rms_norm_eps"), _is_share),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_cache"), _is_switch),
    **dict.fromkeys(_IDS, lambda value: value is None or _is_id(value)),
    **dict.fromkeys(("model_type", "transformers_version", "_name_or_path"), _is_word),
    **dict.fromkeys(("dtype", "torch_dtype"), _is_dtype),
    "architectures": _are_words,
    "hidden_act": lambda value: bool(value == "silu"),
    "rope_theta": lambda value: is_number(value) and value > 0,
    "rope_scaling": lambda value: value is None,
    "quantization_config": lambda value: True,
}  # fmt: skip
_DRAWN: Mapping[str, Plain] = {
    **dict.fromkeys(_IDS, _are_ids),
    **dict.fromkeys(("temperature", "top_p", "top_k"), is_number),
    **dict.fromkeys(("do_sample", "_from_model_config"), _is_switch),
    **dict.fromkeys(("transformers_version", "_name_or_path"), _is_word),
}  # fmt: skip
