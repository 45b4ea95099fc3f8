"""Bamba: state spaces or attention, as Granite 4 has them to llama.cpp, and rotation.

Half of a head is rotated: of that half alone, what is i and i + half of it in a checkpoint become
neighbours.
"""

from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, head_width, integers, number
from qtool.formats.gguf_values import boolean
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.granite_4 import twice_as_wide
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import BLOCK, OUTER, Module, attention, block, in_blocks
from qtool.gguf.architectures.row import LLAMA_ROPE, Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.architectures.state_spaces import (
    ATTENTION,
    STATE,
    by_block,
    is_a,
    no_limit,
    sized,
    state_space,
)
from qtool.gguf.from_hf.row_maps import RowMap, Rows


def _rotated(config: Config) -> int:
    rope = config["rope_parameters"]["full_attention"]
    return int(head_width(config) * number(rope, "partial_rotary_factor"))


def _pairs_of_the_rotated(module: Module, config: Config) -> Module:
    if module.rows is None:
        return module
    width, rotated = head_width(config), _rotated(config)
    half = rotated // 2

    def forward(rows: Rows, groups: int, total: int) -> Rows:
        k = rows % width
        there: Rows = rows + (k < rotated) * (k % 2 * half + k // 2 - k)
        return there

    def inverse(rows: Rows, groups: int, total: int) -> Rows:
        k = rows % width
        here: Rows = rows + (k < rotated) * (k % max(half, 1) * 2 + k // max(half, 1) - k)
        return here

    return replace(module, rows=RowMap(forward, inverse, module.rows.groups, unit=2))


_MODULES = (
    OUTER[0],
    Module("model.final_layernorm", shape=("width",), called="output_norm"),
    OUTER[2],
    *block("input_layernorm"),
    Module(BLOCK + "pre_ff_layernorm", shape=("width",), called="ffn_norm"),
    *in_blocks(is_a(ATTENTION), tuple(
        replace(m, fit=_pairs_of_the_rotated) for m in attention(pairs=True)
    )),
    *in_blocks(is_a(STATE), state_space(BLOCK + "mamba.")),
    *(Module(f"{BLOCK}feed_forward.{part}_proj", called=f"ffn_{part}")
      for part in ("gate", "up", "down")),
)  # fmt: skip


def _kinds(config: dict[str, Any]) -> dict[str, Any]:
    """Of each block, where config.json lists those that attend."""
    attending = config.get("attn_layer_indices")
    if attending is None and config.get("layer_types") is not None:
        return {"mamba_d_head": "auto", **config}
    attending = integers(config, "attn_layer_indices")
    blocks = range(count(config, "num_hidden_layers"))
    kinds = ["full_attention" if b in attending else "linear_attention" for b in blocks]
    return {"mamba_d_head": "auto", **config, "layers_block_type": kinds}


def _even(config: Config) -> str | None:
    return None if _rotated(config) % 2 == 0 else f"{_rotated(config)} elements of heads rotate"


# fmt: off
BAMBA: dict[str, Architecture] = {
    "BambaForCausalLM": Architecture(
        "granitehybrid", _MODULES,
        with_own(
            (key for key in keys.LLAMA if not key.name.startswith("expert_")), keys.ROTATED_OF_HEAD,
            Key("rope.scaling.finetuned", "", lambda _: boolean(True)),
            by_block("num_key_value_heads", ATTENTION),
            *sized("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads"),
        ),
        {"num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_n_groups": 1,
         "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
         "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
         "rope_partial_rotary_factor": 0.5, "vocab_size": 128000},
        rope=LLAMA_ROPE, settle=_kinds,
        refuse=(limits.plain_heads, limits.no_biases("mamba_proj_bias"), no_limit, twice_as_wide,
                _even),
        warn=(limits.no_dynamic_rope,),
    ),
}
# fmt: on
