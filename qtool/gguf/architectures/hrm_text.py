"""HRM-Text: two stacks of blocks, of which the one runs several times to each run of the other.

    checkpoint  L_module.layers.N   H_module.layers.N          gate, queries, keys, values in one
    gguf        blk.N               blk.(blocks of L + N)      each apart

llama.cpp is told as many blocks as runs of them, each of which has keys and values of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, number
from qtool.formats.gguf_values import Value, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import OUTER, Module
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sizes import SIZES
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.from_hf.row_maps import some_rows

_PER_STACK = "num_layers_per_stack"


def _part(which: int, parts: int, size: str) -> Callable[[Module, Config], Module]:
    """One of several matrices of a height, which the checkpoint has one below the other."""

    def fit(module: Module, config: Config) -> Module:
        height = SIZES[size](config)
        first, last = which * height, (which + 1) * height
        rows = some_rows(first, last, parts * height, "num_attention_heads")
        return replace(module, rows=rows)

    return fit


def _stack(letter: str, behind: str) -> tuple[Module, ...]:
    at = f"model.{letter}_module.layers.{{b}}."
    qkv, mlp = at + "attn.gqkv_proj", at + "mlp.gate_up_proj"
    return (
        *(Module(f"{qkv}.{name}", within=qkv, shape=("heads", "width"), called=f"attn_{name}",
                 fit=_part(i, 4, "heads"), behind=behind)
          for i, name in enumerate(("gate", "q", "k", "v"))),
        Module(at + "attn.o_proj", shape=("width", "heads"), called="attn_output", behind=behind),
        *(Module(f"{mlp}.{name}", within=mlp, shape=("inner", "width"), called=f"ffn_{name}",
                 fit=_part(i, 2, "inner"), behind=behind)
          for i, name in enumerate(("gate", "up"))),
        Module(at + "mlp.down_proj", called="ffn_down", behind=behind),
    )  # fmt: skip


_MODULES = (
    OUTER[0],
    OUTER[2],
    Module("model.z_L_init", ends=(("", ""),), shape=("width",), called="hrm.z_l_init"),
    *_stack("L", ""),
    *_stack("H", _PER_STACK),
)


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """Blocks are those of one stack, which older ones call num_hidden_layers."""
    own = config.get(_PER_STACK) or config.get("num_hidden_layers")
    scale = config.get("embedding_scale")
    if scale is None:
        scale = 1 / number({"initializer_range": 0.02, **config}, "initializer_range")
    return {**config, "num_hidden_layers": own, _PER_STACK: own, "embedding_scale": scale}


def _runs(config: Config) -> Value:
    cycles = count(config, "H_cycles") * (count(config, "L_cycles") + 1)
    return u32(count(config, _PER_STACK) * cycles)


def _both_ways(config: Config) -> str | None:
    if not config.get("prefix_lm"):
        return None
    return (
        "the model may attend to a question both ways (prefix_lm), and llama.cpp attends to what "
        "came before: with token_type_ids results differ"
    )


HRM_TEXT: dict[str, Architecture] = {
    "HrmTextForCausalLM": Architecture(
        "hrm_text", _MODULES,
        with_own(
            (k for k in keys.USUAL if not k.name.startswith(("expert_", "attention.head_count_"))),
            Key("block_count", "", _runs),
            Key("rope.dimension_count", "head_dim"),
            Key("embedding_scale", "embedding_scale", real=True),
            Key("hrm.layers_per_stack", _PER_STACK),
            Key("hrm.h_cycles", "H_cycles"),
            Key("hrm.l_cycles", "L_cycles"),
            Key("hrm.prefix_lm", "prefix_lm", flag=True),
        ),
        {"head_dim": 128, "H_cycles": 2, "L_cycles": 3, "prefix_lm": True,
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        names="llama", settle=_settled, refuse=(limits.no_biases("attention_bias", "mlp_bias"),),
        warn=(_both_ways, limits.no_dynamic_rope),
    ),
}  # fmt: skip
