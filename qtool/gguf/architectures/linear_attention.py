"""Decoders whose blocks take turns: a gated delta net in most, attention with a gate in the others.

A delta net has K heads of keys and V heads of values, r = V / K of these to each key. Checkpoints
keep the values of a key together, llama.cpp the first value of every key, then the second ones:

    checkpoint  (key 0: v 0 .. r-1) (key 1: v 0 .. r-1) ...
    gguf        (v 0 of all keys) (v 1 of all keys) ...

so that rows of what makes values, and columns of what reads them, change places. Qwen3-Next mixes
queries, keys, values and gates key by key in one matrix, of which llama.cpp has two.
"""

from dataclasses import replace

import numpy as np

from qtool.checkpoints.hf_config import Config, count, head_width, layer_types
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.limits import Limit
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    QK_NORMS,
    TWO_NORMS,
    Module,
    block,
    norms_plus_one,
)
from qtool.gguf.architectures.mtp import MTP, MTP_MODULES
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse import QWEN_EXPERTS, SHARED_EXPERT
from qtool.gguf.architectures.sparse_keys import NEXTN_OF_MTP
from qtool.gguf.from_hf.row_maps import RowMap, Rows, listed
from qtool.gguf.from_hf.value_maps import MINUS_EXP

BARE = (("", ""),)  # how a parameter ends that is no weight of a module
_EVERY = 4  # blocks, of which the last has attention, unless config.json says otherwise
_SECTIONS = (11, 11, 10)  # of the class: how many pairs tell time, height and width


def is_linear(config: Config, block: int) -> bool:
    """Whether a block has a delta net; those of multi-token prediction have attention."""
    if block >= count(config, "num_hidden_layers"):
        return False
    if kinds := layer_types(config):
        return kinds[block] == "linear_attention"
    return (block + 1) % _interval(config) != 0


def has_attention(config: Config, block: int) -> bool:
    """Whether it has attention instead."""
    return not is_linear(config, block)


def _interval(config: Config) -> int:
    given = config.get("full_attention_interval") is not None
    return count(config, "full_attention_interval") if given else _EVERY


def _tiled(rows: Rows, keys: int, values: int, width: int) -> Rows:
    """The checkpoint's row of each of the file's: `width` of them to a head of values."""
    head, k = np.divmod(rows, width)
    which, key = np.divmod(head, keys)
    there: Rows = (key * (values // keys) + which) * width + k
    return there


def _grouped(rows: Rows, keys: int, values: int, width: int) -> Rows:
    head, k = np.divmod(rows, width)
    key, which = np.divmod(head, values // keys)
    there: Rows = (which * keys + key) * width + k
    return there


def _heads(config: Config) -> tuple[int, int]:
    return count(config, "linear_num_key_heads"), count(config, "linear_num_value_heads")


def _tiles(module: Module, config: Config, *, after: int, width: int) -> Module:
    keys, values = _heads(config)
    if keys == values or values % keys:  # the latter is refused
        return module

    def forward(rows: Rows, groups: int, total: int) -> Rows:
        return np.where(rows < after, rows, after + _tiled(rows - after, keys, values, width))

    def inverse(rows: Rows, groups: int, total: int) -> Rows:
        return np.where(rows < after, rows, after + _grouped(rows - after, keys, values, width))

    total = after + values * width
    rows = RowMap(forward, inverse, "linear_num_key_heads", taken=(total, total))
    return replace(module, rows=rows)


def _values_after_keys(module: Module, config: Config) -> Module:
    keys, _ = _heads(config)
    after = 2 * keys * count(config, "linear_key_head_dim")
    return _tiles(module, config, after=after, width=count(config, "linear_value_head_dim"))


def _values(module: Module, config: Config) -> Module:
    return _tiles(module, config, after=0, width=count(config, "linear_value_head_dim"))


def _value_heads(module: Module, config: Config) -> Module:
    return _tiles(module, config, after=0, width=1)


def _value_columns(module: Module, config: Config) -> Module:
    (keys, values), width = _heads(config), count(config, "linear_value_head_dim")
    if keys == values or values % keys:
        return module
    columns = np.arange(values * width, dtype=np.int64)
    return replace(module, columns=_tiled(columns, keys, values, width))


def _part_of_mixed(module: Module, config: Config) -> Module:
    """Rows of queries, keys and values, or of gates, of a matrix that has all four key by key."""
    (keys, values), width = _heads(config), count(config, "linear_key_head_dim")
    own = values // keys * count(config, "linear_value_head_dim")
    sizes = {"q": width, "k": width, "v": own, "z": own}
    each = sum(sizes.values())
    found, start = {}, 0
    for part, size in sizes.items():
        at = np.arange(keys, dtype=np.int64)[:, None] * each + start + np.arange(size)
        found[part], start = at.reshape(-1), start + size
    parts = "z" if module.called == "attn_gate" else "qkv"
    order = np.concatenate([found[part] for part in parts])
    return replace(module, rows=listed(order, keys * each, "linear_num_key_heads"))


def _delta_net(*modules: Module) -> tuple[Module, ...]:
    prefix = BLOCK + "linear_attn."
    return tuple(
        replace(m, name=prefix + m.name, within=m.within and prefix + m.within, blocks=is_linear)
        for m in modules
    )


_WIDE = ("keys and values", "width")
FULL_ATTENTION = tuple(
    replace(module, blocks=has_attention)
    for module in (
        Module(BLOCK + "self_attn.q_proj", shape=("two of each head", "width")),
        *block("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", *QK_NORMS),
    )
)
_AROUND = norms_plus_one((*OUTER, *FULL_ATTENTION, *block(*TWO_NORMS), *MTP_MODULES))
_CONV = ("keys and values", "kernel")
DELTA_NET = _delta_net(
    Module("in_proj_qkv", shape=_WIDE, fit=_values_after_keys),
    Module("in_proj_z", shape=("values", "width"), fit=_values),
    Module("in_proj_b", shape=("value heads", "width"), fit=_value_heads),
    Module("in_proj_a", shape=("value heads", "width"), fit=_value_heads),
    Module("conv1d", shape=_CONV, squeezed=True, fit=_values_after_keys),
    Module("dt_bias", ends=((".bias", ""),), called="ssm_dt", shape=("value heads",),
           fit=_value_heads),
    Module("A_log", ends=BARE, called="ssm_a", shape=("value heads",), values=MINUS_EXP,
           fit=_value_heads),
    Module("norm", shape=("value head",)),
    Module("out_proj", shape=("width", "values"), fit=_value_columns),
)  # fmt: skip
_QWEN35 = (*_AROUND, *DELTA_NET)
_QWEN3_NEXT = (
    *_AROUND,
    *_delta_net(
        Module("in_proj_qkvz.qkv", within="in_proj_qkvz", called="attn_qkv", shape=_WIDE,
               fit=_part_of_mixed),
        Module("in_proj_qkvz.z", within="in_proj_qkvz", called="attn_gate",
               shape=("values", "width"), fit=_part_of_mixed),
        Module("in_proj_ba", shape=("two of each value head", "width")),
        Module("conv1d", shape=_CONV, squeezed=True),
        Module("dt_bias", ends=((".bias", ""),), called="ssm_dt", shape=("value heads",)),
        Module("A_log", ends=BARE, called="ssm_a", shape=("value heads",), values=MINUS_EXP),
        Module("norm", shape=("value head",)),
        Module("out_proj", shape=("width", "values")),
    ),
)  # fmt: skip
SPARSE_MLP = (*QWEN_EXPERTS, *block("mlp.gate", "mlp.shared_expert_gate", *SHARED_EXPERT))


def _blocks(config: Config) -> Value:
    ahead = config.get("mtp_num_hidden_layers") or 0
    return u32(count(config, "num_hidden_layers") + ahead)


def _recurrent(config: Config) -> Value | None:
    if config.get("layer_types") is None:
        return None
    blocks = range(int(_blocks(config).value))
    return array(Kind.BOOL, [is_linear(config, block) for block in blocks])


def _rotated(config: Config) -> Value:
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    return u32(int(head_width(config) * share))


def _sections(config: Config) -> Value:
    given = config["rope_parameters"]["full_attention"].get("mrope_section") or _SECTIONS
    return array(Kind.INT32, [*given, 0, 0, 0, 0][:4])


def _inner(config: Config) -> Value:
    _, values = _heads(config)
    return u32(values * count(config, "linear_value_head_dim"))


KEYS = (
    *(key for key in keys.USUAL if key.name != "block_count"),
    Key("block_count", "num_hidden_layers", _blocks),
    NEXTN_OF_MTP,
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
    Key("ssm.time_step_rank", "linear_num_value_heads"),
    Key("ssm.inner_size", "linear_value_head_dim", _inner),
    Key("attention.recurrent_layers", "layer_types", _recurrent, listed=True),
    Key("full_attention_interval", "layer_types", lambda config: u32(_interval(config))),
    Key("rope.dimension_count", "rope_parameters", _rotated),
)
SECTIONED = Key("rope.dimension_sections", "rope_parameters", _sections, listed=True)
OF_EXPERTS = (
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
DEFAULTS = {
    "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "rope_partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "attention_bias": False,
}  # fmt: skip
_REFUSE: tuple[Limit, ...] = (limits.one_state, limits.no_biases("attention_bias"))
_WARN = (limits.no_dynamic_rope, limits.one_epsilon)

# fmt: off
_QWEN3_5 = Architecture(
    "qwen35", (*_QWEN35, *block(*MLP)), (*KEYS, SECTIONED),
    {**DEFAULTS, "num_key_value_heads": 4},
    refuse=_REFUSE, warn=_WARN, mtp=MTP,
)
_QWEN3_5_MOE = Architecture(
    "qwen35moe", (*_QWEN35, *SPARSE_MLP), (*KEYS, *OF_EXPERTS, SECTIONED),
    {**DEFAULTS, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
     "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    refuse=_REFUSE, warn=_WARN, mtp=MTP,
)

LINEAR_ATTENTION: dict[str, Architecture] = {
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "MiniCPMV4_6ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "Qwen3NextForCausalLM": Architecture(
        "qwen3next", (*_QWEN3_NEXT, *SPARSE_MLP), (*KEYS, *OF_EXPERTS),
        {**DEFAULTS, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
         "norm_topk_prob": True, "decoder_sparse_step": 1},
        refuse=(*_REFUSE, limits.experts_everywhere, limits.chosen_add_up(True)), warn=_WARN,
        mtp=MTP,
    ),
}
# fmt: on
