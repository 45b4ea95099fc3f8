"""DeciLM (Nemotron Super and Ultra): Llama whose blocks have as many heads of keys, and an MLP as
wide, as each needs; some have no attention, or a matrix in its place, or no MLP. Its class comes
with its checkpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import (
    BY_BLOCK,
    Config,
    count,
    head_width,
    integers,
    number,
    of_block,
)
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    TWO_NORMS,
    Module,
    Where,
    block,
    in_blocks,
)
from qtool.gguf.architectures.remote_llamas import in_pairs
from qtool.gguf.architectures.row import OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.from_hf.row_maps import RowMap, Rows
from qtool.messages.printable import in_json


def _described(config: Config) -> list[Mapping[str, Any]]:
    """What DeciLM says of each block; SourceError where it is no such list."""
    given, blocks = config.get("block_configs"), count(config, "num_hidden_layers")
    parts: list[Any] = [None]
    if isinstance(given, list) and len(given) == blocks:
        own = [one if isinstance(one, Mapping) else {} for one in given]
        parts = [one.get(part) for one in own for part in ("attention", "ffn")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise SettingError(
            "block_configs", f"is not a list of {blocks} objects with attention and ffn"
        )
    found: list[Mapping[str, Any]] = given or []
    return found


def _settle_deci(config: dict[str, Any]) -> dict[str, Any]:
    blocks, heads = count(config, "num_hidden_layers"), count(config, "num_attention_heads")
    config["heads_in_a_row"] = 1
    if config.get("block_configs") is None:
        each = integers(config, "num_key_value_heads_per_layer")
        if each:
            limits.listed(config, "num_key_value_heads_per_layer", blocks)
            config[BY_BLOCK] = [{"num_key_value_heads": one} for one in each]
            config["num_key_value_heads"] = max(each)
        return config
    found = []
    for one in _described(config):
        grouped, times = one["attention"].get("n_heads_in_group"), one["ffn"].get("ffn_mult")
        linear = bool(one["attention"].get("replace_with_linear"))
        own = 0 if grouped is None else heads // count({"n_heads_in_group": grouped}, _IN_GROUP)
        wide = 0 if times is None else number({"ffn_mult": times}, "ffn_mult")
        inner = -(-int(2 * wide * count(config, "hidden_size") / 3) // _OF_INNER) * _OF_INNER
        found.append({
            "num_attention_heads": heads if own or linear else 0, "num_key_value_heads": own,
            "intermediate_size": inner,
        })  # fmt: skip
    config["num_key_value_heads"] = max(one["num_key_value_heads"] for one in found)
    config["intermediate_size"] = max(one["intermediate_size"] for one in found)
    return {**config, BY_BLOCK: found}


_IN_GROUP, _OF_INNER = "n_heads_in_group", 256


def _has(name: str) -> Where:
    return lambda config, b: bool(of_block(config, b).get(name))


_attends, _has_mlp = _has("num_key_value_heads"), _has("intermediate_size")


def _linear(config: Config, b: int) -> bool:
    return _has("num_attention_heads")(config, b) and not _attends(config, b)


def _headsin_pairs(module: Module, config: Config) -> Module:
    width = head_width(config)

    def inverse(rows: Rows, groups: int, _: int) -> Rows:
        k = rows % width
        found: Rows = rows - k + k % (width // 2) * 2 + k // (width // 2)
        return found

    rows = RowMap(lambda rows, groups, _: in_pairs(rows, width), inverse, "heads_in_a_row", unit=2)
    return replace(module, rows=rows)


_AT = BLOCK + "self_attn."
_DECI = (
    *OUTER,
    *in_blocks(_attends, (
        Module(_AT + "q_proj", fit=_headsin_pairs), Module(_AT + "k_proj", fit=_headsin_pairs),
        Module(_AT + "v_proj"), Module(_AT + "o_proj"),
    )),
    Module(_AT + "linear_attn", called="attn_output", shape=("width", "width"), blocks=_linear),
    *in_blocks(_has("num_attention_heads"), block(TWO_NORMS[0])),
    *in_blocks(_has_mlp, block(TWO_NORMS[1], *MLP)),
)  # fmt: skip


def _by_block(name: str, setting: str) -> Key:
    """A number, or one for each block where they differ by what config.json says of blocks."""

    def make(config: Config) -> Value:
        if not config.get(BY_BLOCK):
            return u32(count(config, setting))
        blocks = range(count(config, "num_hidden_layers"))
        return array(Kind.INT32, [of_block(config, b)[setting] for b in blocks])

    def plain(config: Config) -> Value:
        listed = (config.get(BY_BLOCK) or [{}])[0]
        return make(config) if setting in listed else u32(count(config, setting))

    return Key(name, "", plain, listed=True)


def _width_by_block(config: Config) -> Value | None:
    said = config.get("block_configs") is not None or config.get("head_dim") is not None
    return u32(head_width(config)) if said else None


def _known_blocks(config: Config) -> str | None:
    if config.get("block_configs") is None:
        return None
    blocks = config[BY_BLOCK]
    for b, own in enumerate(blocks):
        if not own["intermediate_size"] and own["num_attention_heads"]:
            return f"block {b} has no MLP, and it then leaves out the attention too"
    if not blocks[-1]["intermediate_size"]:
        return "the last block has no MLP, and it stops there"
    for b, one in enumerate(_described(config)):
        for part, name in (("attention", "window_length"), ("attention", "num_sink_tokens"),
                           ("attention", "sparsify"), ("ffn", "sparsify"),
                           ("ffn", "replace_with_linear")):  # fmt: skip
            if one[part].get(name):
                said = in_json(one[part][name])
                return f"{name} of block {b}'s {part} is {said}, and it has no such"
    return None


# fmt: off
DECI: dict[str, Architecture] = {
    "DeciLMForCausalLM": Architecture(
        "deci", _DECI,
        with_own(keys.LLAMA, _by_block("attention.head_count", "num_attention_heads"),
                 _by_block("attention.head_count_kv", "num_key_value_heads"),
                 _by_block("feed_forward_length", "intermediate_size"),
                 Key("attention.key_length", "", _width_by_block),
                 Key("attention.value_length", "", _width_by_block)),
        {**OWN_HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
        rope=("default", "llama3"), remote=True, settle=_settle_deci,
        refuse=(limits.plain_heads, _known_blocks, limits.no_biases("attention_bias", "mlp_bias")),
    ),
}
# fmt: on
