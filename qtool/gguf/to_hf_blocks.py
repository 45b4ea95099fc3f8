"""What each block of a model has, where blocks differ: config.json told by GGUF metadata."""

from collections.abc import Mapping
from typing import Any

from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.architectures import Architecture
from qtool.gguf.architectures.short_convolutions import CONVOLUTION
from qtool.gguf.architectures.state_spaces import ATTENTION, EXPERTS, MLP, STATE


def put_layer_types(row: Architecture, config: dict[str, Any], given: Mapping[str, Value]) -> None:
    """What each block has in place of attention over all of the text, where blocks differ."""
    if (full := given.get("attention.indexer.types")) is not None:
        config["indexer_types"] = ["full" if one else "shared" for one in full.value]
    if row.name in ("nemotron_h", "nemotron_h_moe"):
        _put_state_spaces(row, config, given)
    if row.name == "granitehybrid":
        config["layer_types"] = [
            "full_attention" if one else "linear_attention"
            for one in given["attention.head_count_kv"].value
        ]
    if row.name in ("lfm2", "lfm2moe"):
        heads = given["attention.head_count_kv"].value
        config["layer_types"] = ["full_attention" if one else CONVOLUTION for one in heads]
        config["num_key_value_heads"] = max(heads)
    if not any(key.setting == "layer_types" for key in row.keys):
        return
    if "ssm.state_size" in {key.name for key in row.keys}:
        _put_linear_attention(config, given)
        return
    blocks = config["num_hidden_layers"]
    if row.name == "exaone4" and "attention.sliding_window" not in given:
        config |= {"sliding_window": None, "layer_types": ["full_attention"] * blocks}
        return
    period = {"gemma2": 2, "gemma3": 6}.get(row.name, 4)
    pattern = given.get("attention.sliding_window_pattern")
    if pattern is not None and pattern.kind == Kind.ARRAY:
        windows = [bool(value) for value in pattern.value]
    else:
        every = max(1, pattern.value) if pattern is not None else period
        windows = [(i + 1) % every != 0 for i in range(blocks)]
    config["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]


def _put_state_spaces(
    row: Architecture, config: dict[str, Any], given: Mapping[str, Value]
) -> None:
    heads, inner = (
        [*given[name].value] for name in ("attention.head_count_kv", "feed_forward_length")
    )
    wide, setting = (
        (EXPERTS, "moe_intermediate_size")
        if row.name.endswith("moe")
        else (MLP, "intermediate_size")
    )
    letters = [wide if f else ATTENTION if h else STATE for h, f in zip(heads, inner, strict=True)]
    config |= {
        "hybrid_override_pattern": "".join(letters),
        "num_hidden_layers": len(letters),
        "num_key_value_heads": max(heads),
        setting: max(inner),
        "mamba_head_dim": given["ssm.inner_size"].value // given["ssm.time_step_rank"].value,
    }


def _put_linear_attention(config: dict[str, Any], given: Mapping[str, Value]) -> None:
    every = given.get("full_attention_interval")
    config["full_attention_interval"] = 4 if every is None else every.value
    linear = given.get("attention.recurrent_layers")
    if linear is not None:
        own = linear.value[: config["num_hidden_layers"]]
        kinds = ["linear_attention" if one else "full_attention" for one in own]
        config["layer_types"] = kinds
