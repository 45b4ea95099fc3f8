"""Mamba, Mamba 2 and Falcon Mamba, whose blocks have a state space and nothing else; and Jamba,
which has attention in some blocks and experts in some.

A state space of Mamba 1 has a state for each channel:

    A_log [channels, states]     D [channels]

llama.cpp has -exp(A_log).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, number
from qtool.formats.gguf_values import Kind, Value, array, boolean, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    Module,
    Where,
    attention,
    block,
    in_blocks,
)
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.architectures.state_spaces import LONGEST, no_limit, sized, state_space
from qtool.gguf.from_hf.row_maps import FIRST_HALF, SECOND_HALF, RowMap
from qtool.gguf.from_hf.value_maps import MINUS_EXP

_BARE = (("", ""),)
_AT = "backbone.layers.{b}."
_INNER = "channels of Mamba"


def selective(at: str) -> tuple[Module, ...]:
    """A state space of Mamba 1."""
    return (
        Module(at + "in_proj", shape=("two of Mamba's channels", "width"), called="ssm_in"),
        Module(at + "conv1d", shape=(_INNER, "state's taps"), squeezed=True, called="ssm_conv1d"),
        Module(at + "x_proj", shape=("steps and states", _INNER), called="ssm_x"),
        Module(at + "dt_proj", shape=(_INNER, "rank of steps"), called="ssm_dt"),
        Module(at + "A_log", ends=_BARE, shape=(_INNER, "states"), values=MINUS_EXP,
               called="ssm_a"),
        Module(at + "D", ends=_BARE, shape=(_INNER,), called="ssm_d"),
        Module(at + "out_proj", shape=("width", _INNER), called="ssm_out"),
    )  # fmt: skip


_AROUND = (
    Module("backbone.embeddings", shape=("vocabulary", "width")),
    Module("backbone.norm_f", shape=("width",)),
    OUTER[2],
    Module(_AT + "norm"),
)


def _ranked(setting: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Steps are of a sixteenth of the width, where nothing else is said."""

    def settle(config: dict[str, Any]) -> dict[str, Any]:
        if config.get(setting) in (None, "auto"):
            config[setting] = -(-count(config, "hidden_size") // 16)
        return config

    return settle


def _settle_2(config: dict[str, Any]) -> dict[str, Any]:
    """Under the names that other decoders have for the same."""
    return config | {
        "mamba_num_heads": config.get("num_heads"),
        "mamba_head_dim": config.get("head_dim"),
        "ssm_state_size": config.get("state_size"),
    }


def _none(key: str) -> Key:
    """Zero, which llama.cpp asks for where there is no such thing."""
    return Key(key, "", lambda _: u32(0))


def _channels(config: Config) -> Value:
    expand = "expand" if config.get("expand") is not None else "mamba_expand"
    return u32(count(config, expand) * count(config, "hidden_size"))


_ALONE = (
    Key("context_length", "", lambda _: u32(LONGEST)),
    Key("embedding_length", "hidden_size"),
    Key("block_count", "num_hidden_layers"),
    _none("feed_forward_length"),
    _none("attention.head_count"),
    replace(keys.RMS, setting="layer_norm_epsilon"),
)
_SELECTIVE = (
    Key("ssm.conv_kernel", "conv_kernel"),
    Key("ssm.state_size", "state_size"),
    Key("ssm.time_step_rank", "time_step_rank"),
    Key("ssm.inner_size", "", _channels),
)


def _norms(flag: bool) -> Key:
    """Whether steps and what goes in and out of the state are normed."""
    return Key("ssm.dt_b_c_rms", "", lambda _: boolean(flag), flag=True)


def _twice_as_wide(setting: str) -> limits.Limit:
    def check(config: Config) -> str | None:
        given = config.get(setting)
        return None if given == 2 else f"{setting} is {given}, and it takes 2"

    return check


def _one_epsilon(config: Config) -> str | None:
    one, other = number(config, "mixer_rms_eps"), number(config, "layer_norm_epsilon")
    if one == other:
        return None
    return (
        f"mixer_rms_eps is {one}, and llama.cpp adds layer_norm_epsilon ({other}) to the norms "
        "within state spaces too: results differ a little"
    )


def _whole_heads(config: Config) -> str | None:
    width = count(config, "hidden_size") * count(config, "expand")
    if count(config, "num_heads") * count(config, "head_dim") == width:
        return None
    return f"num_heads times head_dim is not expand times hidden_size ({width})"


# Jamba.
_MOE = BLOCK + "feed_forward."


def _each(period: str, offset: str) -> Where:
    """Each so many-th block, from one on."""
    return lambda config, b: b % count(config, period) == config[offset]


_attends = _each("attn_layer_period", "attn_layer_offset")


def routes(config: Config, b: int) -> bool:
    """Whether a block has experts."""
    own = _each("expert_layer_period", "expert_layer_offset")(config, b)
    return own and count(config, "num_experts") > 1


def _not(where: Where) -> Where:
    return lambda config, b: not where(config, b)


def _expert(name: str, fused: str, rows: RowMap | None) -> Module:
    part = name.removesuffix("_proj")
    return Module(
        f"{_MOE}experts.{name}",
        each=(f"{_MOE}experts.{{i}}.{name}", "num_experts"),
        fused=(f"{_MOE}experts.{fused}", rows),
        shape=("experts", *(("width", "inner") if part == "down" else ("inner", "width"))),
        called=f"ffn_{part}_exps",
    )


_NORMS = tuple(f"mamba.{part}_layernorm" for part in "bc")
_JAMBA = (
    OUTER[0],
    Module("model.final_layernorm", shape=("width",)),
    OUTER[2],
    *block("input_layernorm"),
    Module(BLOCK + "pre_ff_layernorm", shape=("width",)),
    *in_blocks(_attends, attention()),
    *in_blocks(_not(_attends), (
        *selective(BLOCK + "mamba."),
        Module(BLOCK + "mamba.dt_layernorm", shape=("rank of steps",)),
        *(Module(BLOCK + name, shape=("states",)) for name in _NORMS),
    )),
    *in_blocks(_not(routes), block(*(f"feed_forward.{p}_proj" for p in ("gate", "up", "down")))),
    *in_blocks(routes, (
        Module(_MOE + "router", shape=("experts", "width")),
        _expert("gate_proj", "gate_up_proj", FIRST_HALF),
        _expert("up_proj", "gate_up_proj", SECOND_HALF),
        _expert("down_proj", "down_proj", None),
    )),
)  # fmt: skip


def _key_heads(config: Config) -> Value:
    blocks, heads = range(count(config, "num_hidden_layers")), count(config, "num_key_value_heads")
    return array(Kind.INT32, [heads if _attends(config, b) else 0 for b in blocks])


def _within_a_period(config: Config) -> str | None:
    for kind in ("attn", "expert"):
        period, offset = (config.get(f"{kind}_layer_{part}") for part in ("period", "offset"))
        if not (isinstance(offset, int) and isinstance(period, int) and 0 <= offset < period):
            return f"{kind}_layer_offset is {offset}, and it expects less than the period {period}"
    return None


# fmt: off
_DEFAULTS = {
    "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "state_size": 16,
    "use_bias": False, "use_conv_bias": True, "vocab_size": 50280,
    "tie_word_embeddings": True,
}
_REFUSE = (limits.no_biases("use_bias"), limits.needs("use_conv_bias"))
_ROW = Architecture(
    "mamba", (*_AROUND, *selective(_AT + "mixer.")), (*_ALONE, *_SELECTIVE, _norms(False)),
    _DEFAULTS, rope=("default",), refuse=(*_REFUSE, _twice_as_wide("expand")), warn=(),
    settle=_ranked("time_step_rank"),
)
MAMBA: dict[str, Architecture] = {
    "MambaForCausalLM": _ROW,
    "FalconMambaForCausalLM": replace(
        _ROW, keys=(*_ALONE, *_SELECTIVE, _norms(True)),
        defaults={**_DEFAULTS, "mixer_rms_eps": 1e-6}, warn=(_one_epsilon,),
    ),
    "Mamba2ForCausalLM": Architecture(
        "mamba2", (*_AROUND, *state_space(_AT + "mixer.")),
        (*_ALONE, *sized("conv_kernel", "state_size", "n_groups", "num_heads")),
        {**_DEFAULTS, "state_size": 128, "num_heads": 128, "head_dim": 64, "n_groups": 8,
         "vocab_size": 32768, "tie_word_embeddings": False},
        rope=("default",), refuse=(*_REFUSE, no_limit, _whole_heads), warn=(), settle=_settle_2,
    ),
    "JambaForCausalLM": Architecture(
        "jamba", _JAMBA,
        with_own(
            (k for k in keys.USUAL if not k.name.startswith("rope.") and k not in keys.HEAD),
            Key("attention.head_count_kv", "num_key_value_heads", _key_heads, listed=True,
                lacking=True),
            Key("ssm.conv_kernel", "mamba_d_conv"),
            Key("ssm.state_size", "mamba_d_state"),
            Key("ssm.time_step_rank", "mamba_dt_rank"),
            Key("ssm.inner_size", "", _channels),
        ),
        {"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2,
         "expert_layer_period": 2,
         "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
         "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
         "mamba_conv_bias": True, "mamba_proj_bias": False, "max_position_embeddings": 262144,
         "rms_norm_eps": 1e-6, "vocab_size": 65536},
        rope=("default",), settle=_ranked("mamba_dt_rank"), warn=(),
        refuse=(limits.no_biases("mamba_proj_bias"), limits.needs("mamba_conv_bias"),
                _twice_as_wide("mamba_expand"), _within_a_period),
    ),
}
# fmt: on
