"""Sizes of tensors by their names in the table, told by the settings of config.json."""

from collections.abc import Callable, Mapping

from qtool.checkpoints.hf_config import Config, count, head_width, number
from qtool.gguf.architectures.shapes_newest import NEWEST


def _heads(config: Config) -> int:
    return count(config, "num_attention_heads") * head_width(config)


def _keys(config: Config) -> int:
    return count(config, "num_key_value_heads") * head_width(config)


def _experts(config: Config) -> int:
    """By the name that the class has for it."""
    return count(config, "n_routed_experts" if config.get("n_routed_experts") else "num_experts")


def _inner_of_experts(config: Config) -> int:
    own = config.get("moe_intermediate_size") is not None
    return count(config, "moe_intermediate_size" if own else "intermediate_size")


def _shared(config: Config) -> int:
    names = ("n_shared_experts", "num_shared_experts")
    own = next((name for name in names if config.get(name)), "moe_num_shared_experts")
    return count(config, own) * _inner_of_experts(config)


def _linear_keys(config: Config) -> int:
    return count(config, "linear_num_key_heads") * count(config, "linear_key_head_dim")


def _linear_values(config: Config) -> int:
    return count(config, "linear_num_value_heads") * count(config, "linear_value_head_dim")


def inner_of_lfm2(config: Config) -> int:
    """Two thirds, times a factor, up to a multiple, unless config.json says that it is not."""
    own = config.get("block_ff_dim") is not None
    width = count(config, "block_ff_dim" if own else "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return width
    width, each = int(number(config, "block_ffn_dim_multiplier") * width), "block_multiple_of"
    return -(-width // count(config, each)) * count(config, each)


def _either(*names: str) -> Callable[[Config], int]:
    """Of settings that classes call differently."""
    return lambda config: count(
        config, next((one for one in names if config.get(one) is not None), names[0])
    )


_state_heads = _either("mamba_num_heads", "mamba_n_heads")
_state_groups = _either("n_groups", "mamba_n_groups")
_state_size = _either("ssm_state_size", "mamba_d_state", "state_size")
_step_rank = _either("time_step_rank", "mamba_dt_rank")


def _channels(config: Config) -> int:
    return count(config, "hidden_size") * _either("expand", "mamba_expand")(config)


def _state(config: Config) -> int:
    if config.get("mamba_d_head") == "auto":
        return count(config, "mamba_expand") * count(config, "hidden_size")
    return _state_heads(config) * _either("mamba_head_dim", "mamba_d_head")(config)


def _state_and_keys(config: Config) -> int:
    return _state(config) + 2 * _state_groups(config) * _state_size(config)


def _falcon_rows(config: Config) -> int:
    from qtool.gguf.architectures.older import key_heads

    heads = count(config, "num_attention_heads")
    return (heads + 2 * key_heads(config)) * (count(config, "hidden_size") // heads)


def _rotated(config: Config) -> int:
    return count(config, "qk_rope_head_dim") if config.get("qk_rope_head_dim") else 0


def _setting(name: str) -> Callable[[Config], int]:
    return lambda config: count(config, name)


SIZES: Mapping[str, Callable[[Config], int]] = {
    "vocabulary": _setting("vocab_size"),
    "width": _setting("hidden_size"),
    "inner": _setting("intermediate_size"),
    "inner without experts": _setting("intermediate_size_mlp"),
    "inner of leading blocks": _setting("prefix_dense_intermediate_size"),
    "inner of LFM2": inner_of_lfm2,
    "inner of experts": _inner_of_experts,
    "gate and up of experts": lambda config: 2 * _inner_of_experts(config),
    "inner of the shared expert": _either(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"
    ),
    "inner of the shared MLP": _setting("shared_intermediate_size"),
    "gate and up of the shared MLP": lambda config: 2 * count(config, "shared_intermediate_size"),
    "moe's width": _either("moe_latent_size", "hidden_size"),
    "state": _state,
    "state's heads": _state_heads,
    "state's groups": _state_groups,
    "state of a group": lambda config: _state(config) // _state_groups(config),
    "state's taps": _either("conv_kernel", "mamba_d_conv"),
    "state and its keys": _state_and_keys,
    "state, gates, steps": lambda config: (
        _state(config) + _state_and_keys(config) + _state_heads(config)
    ),
    "channels of Mamba": _channels,
    "two of Mamba's channels": lambda config: 2 * _channels(config),
    "rank of steps": _step_rank,
    "states": _state_size,
    "steps and states": lambda config: _step_rank(config) + 2 * _state_size(config),
    "inner of shared experts": _shared,
    "positions": _setting("n_positions"),
    "Falcon's queries, keys, values": _falcon_rows,
    "input of a block": _setting("hidden_size_per_layer_input"),
    "inputs of all blocks": lambda config: (
        count(config, "num_hidden_layers") * count(config, "hidden_size_per_layer_input")
    ),
    "streams": _setting("altup_num_inputs"),
    "streams by streams": lambda config: count(config, "altup_num_inputs") ** 2,
    "streams added": lambda config: count(config, "altup_num_inputs") - 1,
    "rank of LAuReL": _setting("laurel_rank"),
    "two widths": lambda config: 2 * count(config, "hidden_size"),
    "three widths": lambda config: 3 * count(config, "hidden_size"),
    "taps": _setting("conv_L_cache"),
    "gate and up": lambda config: 2 * count(config, "intermediate_size"),
    "experts": _experts,
    "one": lambda _: 1,
    "head": head_width,
    "number of heads": _setting("num_attention_heads"),
    "number of key heads": _setting("num_key_value_heads"),
    "heads": _heads,
    "key heads": _keys,
    "queries, keys, values": lambda config: _heads(config) + 2 * _keys(config),
    "three of each head": lambda config: 3 * _heads(config),
    "two of each head": lambda config: 2 * _heads(config),
    "value heads": _setting("linear_num_value_heads"),
    "two of each value head": lambda config: 2 * count(config, "linear_num_value_heads"),
    "value head": _setting("linear_value_head_dim"),
    "values": _linear_values,
    "keys and values": lambda config: 2 * _linear_keys(config) + _linear_values(config),
    "kernel": _setting("linear_conv_kernel_dim"),
    "query latents": _setting("q_lora_rank"),
    "latents": _setting("kv_lora_rank"),
    "latents and rotated keys": lambda config: count(config, "kv_lora_rank") + _rotated(config),
    "queries": lambda config: (
        count(config, "num_attention_heads")
        * (count(config, "qk_nope_head_dim") + _rotated(config))
    ),
    "plain keys": _setting("qk_nope_head_dim"),
    "head of values": _setting("v_head_dim"),
    "plain keys and values": lambda config: (
        count(config, "num_attention_heads")
        * (count(config, "qk_nope_head_dim") + count(config, "v_head_dim"))
    ),
    "indexer's queries": lambda config: (
        count(config, "index_n_heads") * count(config, "index_head_dim")
    ),
    "indexer's key": _setting("index_head_dim"),
    "indexer's heads": _setting("index_n_heads"),
    "heads of values": lambda config: (
        count(config, "num_attention_heads") * count(config, "v_head_dim")
    ),
    **NEWEST,
}
