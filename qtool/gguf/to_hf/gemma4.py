"""Settings of config.json where blocks are of two kinds, told by a GGUF file: Gemma 4's."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.from_hf.rope_tensors import NOT_ROTATED, proportional_divisors
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.keys import plain

_FULL, _WINDOW = "full_attention", "sliding_attention"
_NEEDED = (
    "attention.key_length", "attention.key_length_swa", "attention.sliding_window",
    "attention.sliding_window_pattern", "embedding_length_per_layer_input",
)  # fmt: skip
_FREQUENCIES = "rope_freqs.weight"


def put_blocks(
    config: dict[str, Any],
    given: Mapping[str, Value],
    names: Collection[str],
    source: GgufSource,
) -> None:
    """Heads, keys and values, and the MLP; what each block has is known."""
    for key in _NEEDED:
        if key not in given:
            raise FormatError(f"{source.path}: lacks gemma4.{key}, which llama.cpp asks for")
    kinds = config["layer_types"]
    if len(kinds) != config["num_hidden_layers"] or kinds[-1] != _FULL or _WINDOW not in kinds:
        raise UnsupportedError(
            f"{source.path}: gemma4.attention.sliding_window_pattern is not one of true and false "
            "for each block, of which the last is false, as in every checkpoint"
        )
    config["head_dim"] = plain(given["attention.key_length_swa"])
    config["global_head_dim"] = plain(given["attention.key_length"])
    inner, key_heads = (
        given.get(key) for key in ("feed_forward_length", "attention.head_count_kv")
    )
    for value in (inner, key_heads):
        if value is not None and value.kind is Kind.ARRAY and len(value.value) != len(kinds):
            raise FormatError(
                f"{source.path}: of {len(kinds)} blocks, a list says what {len(value.value)} have"
            )
    if inner is not None and inner.kind is Kind.ARRAY:
        config["intermediate_size"] = plain(inner)[0]
        config["use_double_wide_mlp"] = True
    if config.get("hidden_size_per_layer_input"):
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    own = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    full = [b for b, kind in enumerate(kinds[:own]) if kind == _FULL]
    as_keys = bool(full) and f"blk.{full[0]}.attn_v.weight" not in names
    config["attention_k_eq_v"] = as_keys
    if key_heads is None or key_heads.kind is not Kind.ARRAY:
        return
    each = plain(key_heads)
    config["num_key_value_heads"] = each[kinds.index(_WINDOW)]
    if as_keys:
        config["num_global_key_value_heads"] = each[-1]
        return
    wide = {"head_dim": config.pop("global_head_dim"), "num_key_value_heads": each[-1]}
    config["per_layer_config"] = {str(b): wide for b, kind in enumerate(kinds) if kind == _FULL}


def put_rotations(
    config: dict[str, Any],
    given: Mapping[str, Value],
    vectors: Mapping[str, NDArray[np.float32]],
    source: GgufSource,
) -> None:
    """rope_parameters: of blocks with a window, and of the others a share of each head."""
    theta = plain(given["rope.freq_base"]) if "rope.freq_base" in given else 10000.0
    local = plain(given["rope.freq_base_swa"]) if "rope.freq_base_swa" in given else theta
    if {*vectors} != {_FREQUENCIES}:
        raise FormatError(
            f"{source.path}: has {', '.join(vectors) or 'no rotation factors'}; expected "
            f"{_FREQUENCIES} by itself"
        )
    config.pop("rope_local_base_freq", None)
    config["rope_parameters"] = {
        _FULL: {
            "rope_type": "proportional", "rope_theta": float(theta),
            **_share(vectors[_FREQUENCIES], plain(given["attention.key_length"]), source),
        },
        _WINDOW: {"rope_type": "default", "rope_theta": float(local)},
    }  # fmt: skip


def _share(divisors: NDArray[np.float32], width: int, source: GgufSource) -> dict[str, float]:
    """The settings that give these divisors."""
    rotated = int((divisors < np.float32(NOT_ROTATED)).sum())
    factor = float(str(divisors[0])) if rotated else 1.0
    more = {} if factor == 1.0 else {"factor": factor}
    for share in (2 * rotated / max(width, 1), (2 * rotated + 1) / max(width, 1)):
        told = {"partial_rotary_factor": share, **more}
        sensible = factor > 0 and share <= 1
        if sensible and np.array_equal(proportional_divisors(told, width), divisors):
            return told
    raise UnsupportedError(
        f"{source.path}: {_FREQUENCIES} does not rotate a leading share of a head of {width} "
        "evenly, so that no rope settings of config.json say the same"
    )
