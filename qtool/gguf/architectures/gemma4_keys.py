"""Metadata keys of Gemma 4: sizes of blocks with a window and of those without, and what differs
from block to block as a list."""

from qtool.checkpoints.hf_config import Config, count, layer_types, number, of_block
from qtool.formats.gguf_values import Kind, Value, array, f32, u32
from qtool.gguf.architectures.keys import USUAL, Key, window_pattern
from qtool.gguf.architectures.sparse_keys import with_own


def full_block(config: Config) -> Config:
    """The settings as the blocks without a window have them; the last is one of these."""
    return of_block(config, count(config, "num_hidden_layers") - 1)


def window_block(config: Config) -> Config:
    """The settings as the blocks with a window have them."""
    kinds = layer_types(config)
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else 0
    return of_block(config, first)


def _head(config: Config) -> Value:
    return u32(count(full_block(config), "head_dim"))


def _head_of_window(config: Config) -> Value:
    return u32(count(window_block(config), "head_dim"))


def _key_heads(config: Config) -> Value:
    each = [
        count(of_block(config, b), "num_key_value_heads")
        for b in range(count(config, "num_hidden_layers"))
    ]
    differ = "num_key_value_heads" in config["by_block"][-1]
    return array(Kind.INT32, each) if differ else u32(each[0])


def _inner(config: Config) -> Value:
    if not config.get("use_double_wide_mlp"):
        return u32(count(config, "intermediate_size"))
    blocks = range(count(config, "num_hidden_layers"))
    return array(Kind.INT32, [count(of_block(config, b), "intermediate_size") for b in blocks])


def _softcap(config: Config) -> Value:
    """llama.cpp would take 30 where nothing is said."""
    given = config.get("final_logit_softcapping")
    return f32(0.0 if given is None else number(config, "final_logit_softcapping"))


def _inputs(config: Config) -> Value:
    given = config.get("hidden_size_per_layer_input")
    return u32(count(config, "hidden_size_per_layer_input") if given else 0)


KEYS = with_own(
    USUAL,
    Key("feed_forward_length", "intermediate_size", _inner, listed=True),
    Key("attention.head_count_kv", "num_key_value_heads", _key_heads, listed=True),
    Key("expert_used_count", "top_k_experts"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("attention.key_length", "head_dim", _head),
    Key("attention.value_length", "head_dim", _head),
    Key("attention.key_length_swa", "head_dim", _head_of_window),
    Key("attention.value_length_swa", "head_dim", _head_of_window),
    Key("rope.dimension_count", "head_dim", _head),
    Key("rope.dimension_count_swa", "head_dim", _head_of_window),
    Key("final_logit_softcapping", "final_logit_softcapping", _softcap),
    Key("attention.sliding_window", "sliding_window"),
    Key("attention.shared_kv_layers", "num_kv_shared_layers"),
    Key("embedding_length_per_layer_input", "hidden_size_per_layer_input", _inputs),
    window_pattern(6, always=True),
)
