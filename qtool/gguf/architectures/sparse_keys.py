"""Metadata keys of decoders with experts: how many there are, who chooses them and how they add
up. `experts` is said under the name that the class of transformers has for it."""

from collections.abc import Iterable

from qtool.checkpoints.hf_config import Config, count, head_width, number
from qtool.formats.gguf_values import Value, u32
from qtool.gguf.architectures.keys import MOE, USUAL, Key
from qtool.gguf.architectures.mtp import MTP

Keys = tuple[Key, ...]
SOFTMAX, SIGMOID = 1, 2


def with_own(keys: Iterable[Key], *own: Key) -> Keys:
    """The keys with those of an architecture, which take the place of others of their names."""
    return tuple({key.name: key for key in (*keys, *own)}.values())


def gating(function: int) -> Key:
    """What makes weights of the router's scores; llama.cpp stops where nothing says it."""
    return Key("expert_gating_func", "", lambda config: u32(function))


def blocks_with(mtp: str) -> Key:
    """The number of blocks, with those that a setting counts beyond num_hidden_layers."""

    def make(config: Config) -> Value:
        ahead = count(config, mtp) if config.get(mtp) else 0
        return u32(count(config, "num_hidden_layers") + ahead)

    return Key("block_count", "num_hidden_layers", make)


def _rotated(config: Config) -> Value:
    """Elements of a head that are rotated."""
    if config.get("rotary_dim") is not None:
        return u32(count(config, "rotary_dim"))
    rope = config["rope_parameters"]["full_attention"]
    given = rope.get("partial_rotary_factor") is not None
    share = number(rope, "partial_rotary_factor") if given else 1.0
    return u32(int(head_width(config) * share))


ROTATED = Key("rope.dimension_count", "rope_parameters", _rotated)
GROUPS = (Key("expert_group_count", "n_group"), Key("expert_group_used_count", "topk_group"))
SHARED_COUNT = Key("expert_shared_count", "n_shared_experts")
LEADING = Key("leading_dense_block_count", "first_k_dense_replace")
ADD_UP = Key("expert_weights_norm", "norm_topk_prob", flag=True)
SCALED = Key("expert_weights_scale", "routed_scaling_factor", real=True)
# Of blocks that are there, whatever config.json says.
NEXTN_OF_MTP = Key(
    "nextn_predict_layers", MTP, lambda config: u32(count(config, MTP)) if config.get(MTP) else None
)
NEXTN = Key("nextn_predict_layers", "num_nextn_predict_layers")

ROUTED = with_own(MOE, Key("expert_count", "n_routed_experts"), *GROUPS, SHARED_COUNT, LEADING)
DOTS1 = (*ROUTED, ADD_UP, SCALED, gating(SIGMOID))
GLM4_MOE = with_own(DOTS1, blocks_with("num_nextn_predict_layers"), ROTATED, NEXTN)
MINIMAX_M2 = with_own(
    USUAL,
    Key("expert_feed_forward_length", "intermediate_size"),
    ROTATED,
    gating(SIGMOID),
)


def _shared_by_ernie(config: Config) -> Value | None:
    """Of all shared experts together, which are one."""
    if not config.get("moe_num_shared_experts"):
        return None
    return u32(count(config, "moe_num_shared_experts") * count(config, "moe_intermediate_size"))


ERNIE = with_own(
    MOE,
    Key("expert_count", "moe_num_experts"),
    Key("expert_used_count", "moe_k"),
    Key("interleave_moe_layer_step", "moe_layer_interval"),
    Key("leading_dense_block_count", "moe_layer_start_index"),
    Key("expert_shared_count", "moe_num_shared_experts"),
    Key("expert_shared_feed_forward_length", "", _shared_by_ernie),
)
