"""What each block of a model has, where blocks differ: config.json told by GGUF metadata."""

from collections.abc import Collection, Mapping
from typing import Any

from qtool.errors import FormatError
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.architectures import Architecture
from qtool.gguf.architectures.cohere2_moe import SELECTIONS
from qtool.gguf.architectures.laguna import usual_windows
from qtool.gguf.architectures.short_convolutions import CONVOLUTION
from qtool.gguf.architectures.state_spaces import ATTENTION, EXPERTS, MLP, STATE
from qtool.gguf.to_hf.keys import WHOLE

WITH_STATES = ("mamba", "mamba2", "jamba", "falcon-h1")


def put_layer_types(row: Architecture, config: dict[str, Any], given: Mapping[str, Value]) -> None:
    """What each block has in place of attention over all of the text, where blocks differ."""
    if row.name == "cohere2moe" and (selection := given.get("expert_gating_func")) is not None:
        names = {number: name for name, number in SELECTIONS.items()}
        config["expert_selection_fn"] = names.get(selection.value)
    full = given.get("attention.indexer.types")
    if full is not None and row.name != "dots3note":
        each = full.value if full.element else [full.value] * config["num_hidden_layers"]
        config["indexer_types"] = ["full" if one else "shared" for one in each]
    if row.name in ("nemotron_h", "nemotron_h_moe"):
        _put_state_spaces(row, config, given)
    if row.name == "granitehybrid":
        heads = _by_block(config, given, "attention.head_count_kv")
        config["layer_types"] = ["full_attention" if h else "linear_attention" for h in heads]
        config["num_key_value_heads"] = max(heads)
        config["mamba_d_head"] = _width_of_states(given)
    if row.name in ("kimi-linear", "bailingmoe3"):
        heads = _by_block(config, given, "attention.head_count_kv")
        config["layer_types"] = ["full_attention" if h else "linear_attention" for h in heads]
    if row.name in ("lfm2", "lfm2moe"):
        heads = _by_block(config, given, "attention.head_count_kv")
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
    if row.name == "laguna" and "attention.sliding_window" not in given:
        config["layer_types"] = ["full_attention"] * blocks
        return
    period = {"gemma2": 2, "gpt-oss": 2, "gemma3": 6, "gemma3n": 5}.get(row.name, 4)
    pattern = given.get("attention.sliding_window_pattern")
    if pattern is not None and pattern.kind == Kind.ARRAY:
        windows = [bool(value) for value in pattern.value]
    elif row.name == "laguna":
        windows = usual_windows(blocks)
    else:
        said = pattern is not None and isinstance(pattern.value, int)
        every = max(1, pattern.value) if pattern is not None and said else period
        windows = [(i + 1) % every != 0 for i in range(blocks)]
    config["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]


def _put_state_spaces(
    row: Architecture, config: dict[str, Any], given: Mapping[str, Value]
) -> None:
    heads = _by_block(config, given, "attention.head_count_kv")
    inner = _by_block(config, given, "feed_forward_length")
    wide, setting = (
        (EXPERTS, "moe_intermediate_size")
        if row.name.endswith("moe")
        else (MLP, "intermediate_size")
    )
    letters = [wide if f else ATTENTION if h else STATE for h, f in zip(heads, inner, strict=True)]
    config |= {
        "hybrid_override_pattern": "".join(letters),
        "num_key_value_heads": max(heads),
        setting: max(inner),
        "mamba_head_dim": _width_of_states(given),
    }


def _width_of_states(given: Mapping[str, Value]) -> int:
    return _whole(given, "ssm.inner_size") // _whole(given, "ssm.time_step_rank")


def put_state_spaces(
    config: dict[str, Any], given: Mapping[str, Value], names: Collection[str]
) -> None:
    """Of Mamba, Mamba 2, Jamba and Falcon-H1: heads and kinds of blocks."""
    if "num_heads" in config:
        config["head_dim"] = _width_of_states(given)
    if "mamba_n_heads" in config:
        width = _whole(given, "ssm.inner_size")
        config["mamba_d_head"] = _width_of_states(given)
        norms = "blk.0.ssm_norm.weight" in names
        config |= {"mamba_d_ssm": width, "mamba_rms_norm": norms, "mamba_norm_before_gate": False}
        return
    expand = _whole(given, "ssm.inner_size") // _whole(given, "embedding_length")
    if "mamba_dt_rank" not in config:
        config.pop("intermediate_size", None)
        config["expand"] = expand
        normed = "ssm.dt_b_c_rms" in given and given["ssm.dt_b_c_rms"].value
        if normed and "layer_norm_epsilon" in config:  # one for all norms
            config["mixer_rms_eps"] = config["layer_norm_epsilon"]
        return
    heads = _by_block(config, given, "attention.head_count_kv")
    config |= {"num_key_value_heads": max(heads), "mamba_expand": expand}
    _put_period(config, "attn", [b for b, here in enumerate(heads) if here])
    blocks = range(config["num_hidden_layers"])
    _put_period(config, "expert", [b for b in blocks if f"blk.{b}.ffn_gate_inp.weight" in names])


def _put_period(config: dict[str, Any], kind: str, found: list[int]) -> None:
    """Every so many-th block; _prove and the names of tensors tell where that is not so."""
    first, *others = found or [config["num_hidden_layers"]]
    config[f"{kind}_layer_offset"] = first
    every = others[0] - first if others else config["num_hidden_layers"] + 1
    config[f"{kind}_layer_period"] = max(every, first + 1)


def _whole(given: Mapping[str, Value], key: str) -> int:
    value = given.get(key)
    if value is None or value.kind not in WHOLE or value.value <= 0:
        raise FormatError(f"metadata: {key} is not said, or no number; llama.cpp asks for it")
    return int(value.value)


def _by_block(config: Mapping[str, Any], given: Mapping[str, Value], key: str) -> list[int]:
    """What a key says of each block, in a list or of all at once."""
    blocks, value = config["num_hidden_layers"], given.get(key)
    if value is None or value.kind != Kind.ARRAY:
        return [_whole(given, key)] * blocks
    if value.element not in WHOLE or len(value.value) != blocks:
        raise FormatError(f"metadata: {key} is not a list of {blocks} numbers, one for each block")
    return [*value.value]


def _put_linear_attention(config: dict[str, Any], given: Mapping[str, Value]) -> None:
    every = given.get("full_attention_interval")
    config["full_attention_interval"] = 4 if every is None else every.value
    linear = given.get("attention.recurrent_layers")
    if linear is not None:
        own = linear.value[: config["num_hidden_layers"]]
        kinds = ["linear_attention" if one else "full_attention" for one in own]
        config["layer_types"] = kinds
