"""Selective state spaces (Mamba 2) as parts of decoders.

checkpoint  A_log, D [heads]     norm [heads * width of a head]
gguf        [heads, 1]           [groups, heads * width of a head / groups]
"""

from qtool.checkpoints.hf_config import Config, count, layer_types, number
from qtool.errors import SourceError
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import Module, Where
from qtool.gguf.architectures.sizes import SIZES
from qtool.gguf.from_hf.value_maps import MINUS_EXP

STATE, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
_WORDS = {
    "mamba": STATE, "linear_attention": STATE, "attention": ATTENTION,
    "full_attention": ATTENTION, "mlp": MLP, "moe": EXPERTS,
}  # fmt: skip
LONGEST = 1 << 20  # what llama.cpp is told of models that count no positions
_NO_END = ("none", "inf", "infinity")
_BARE = (("", ""),)


def kinds_of(config: Config) -> str:
    """A letter for each block."""
    blocks = count(config, "num_hidden_layers")
    given = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    if given is None:
        given = layer_types(config) or ["linear_attention"] * blocks
    found = given if isinstance(given, str) else "".join(_WORDS.get(str(k), "?") for k in given)
    if len(found) != blocks or {*found} - {*_WORDS.values()}:
        raise SourceError(f"config.json: the kinds of blocks are not those of {blocks} blocks")
    return found


def is_a(kind: str) -> Where:
    return lambda config, b: kinds_of(config)[b] == kind


def by_block(setting: str, *kinds: str) -> Key:
    """A number in some blocks, zero in the others."""
    key = {"num_key_value_heads": "attention.head_count_kv"}.get(setting, "feed_forward_length")

    def make(config: Config) -> Value:
        number = count(config, setting)
        return array(Kind.INT32, [number if k in kinds else 0 for k in kinds_of(config)])

    return Key(key, setting, make, listed=True, lacking=True)


def state_space(at: str) -> tuple[Module, ...]:
    return (
        Module(at + "in_proj", shape=("state, gates, steps", "width"), called="ssm_in"),
        Module(at + "conv1d", shape=("state and its keys", "state's taps"), squeezed=True,
               called="ssm_conv1d"),
        Module(at + "dt_bias", ends=((".bias", ""),), shape=("state's heads",), called="ssm_dt"),
        Module(at + "A_log", ends=_BARE, shape=("state's heads", "one"), folded=True,
               values=MINUS_EXP, called="ssm_a"),
        Module(at + "D", ends=_BARE, shape=("state's heads", "one"), folded=True, called="ssm_d"),
        Module(at + "norm", shape=("state's groups", "state of a group"), folded=True,
               called="ssm_norm"),
        Module(at + "out_proj", shape=("width", "state"), called="ssm_out"),
    )  # fmt: skip


def no_limit(config: Config) -> str | None:
    given = config.get("time_step_limit") or [0.0, float("inf")]
    most = given[1] if isinstance(given, list) and len(given) > 1 else None
    most = most.get("__float__") if isinstance(most, dict) else most
    if number({"least": given[0]}, "least") <= 0 and str(most).lower() in _NO_END:
        return None
    return f"time_step_limit is {given}, and it limits nothing"


_INNER = Key("ssm.inner_size", "", lambda config: u32(SIZES["state"](config)))


def sized(conv: str, state: str, groups: str, heads: str) -> tuple[Key, ...]:
    return (
        Key("ssm.conv_kernel", conv),
        Key("ssm.state_size", state),
        Key("ssm.group_count", groups),
        Key("ssm.time_step_rank", heads),
        _INNER,
    )
