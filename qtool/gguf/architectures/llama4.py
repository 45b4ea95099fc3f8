"""Llama 4: experts transposed, gate beside up, in each block or each second one; attention in
chunks, and without rotation over all of the text in each fourth block.

    checkpoint  experts.gate_up_proj [experts, width, 2 * inner]
    gguf        ffn_gate_exps, ffn_up_exps [experts, inner, width]
"""

from qtool.checkpoints.hf_config import Config, count
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    TWO_NORMS,
    Module,
    attention,
    block,
    in_blocks,
)
from qtool.gguf.architectures.row import LLAMA_ROPE, Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.from_hf.cuts import Cut
from qtool.gguf.from_hf.row_maps import FIRST_HALF, SECOND_HALF, RowMap
from qtool.messages.printable import in_json

WITHOUT_NORMS = 128  # experts of the model whose queries and keys are not normalized
_AT = BLOCK + "feed_forward."
_PARTS = ("gate_proj", "up_proj", "down_proj")


def _has_experts(config: Config, b: int) -> bool:
    return (b + 1) % count(config, "interleave_moe_layer_step") == 0


def _has_none(config: Config, b: int) -> bool:
    return not _has_experts(config, b)


def _expert(name: str, stored: str, rows: RowMap | None = None) -> Module:
    bare = ((".weight", ""),)
    within = f"{_AT}experts.{stored}"
    return Module(f"{_AT}experts.{name}", rows, within=within, ends=bare, cut=Cut(transposed=True))


def _mlp(prefix: str, inner: str) -> tuple[Module, ...]:
    shapes = ((inner, "width"), (inner, "width"), ("width", inner))
    return tuple(
        Module(f"{_AT}{prefix}{name}", shape=shape)
        for name, shape in zip(_PARTS, shapes, strict=True)
    )


_MODULES = (
    *OUTER,
    *attention(),
    *block(*TWO_NORMS),
    *in_blocks(_has_none, _mlp("", "inner without experts")),
    *in_blocks(
        _has_experts,
        (
            Module(_AT + "router", shape=("experts", "width")),
            *_mlp("shared_expert.", "inner"),
            _expert("gate_proj", "gate_up_proj", FIRST_HALF),
            _expert("up_proj", "gate_up_proj", SECOND_HALF),
            _expert("down_proj", "down_proj"),
        ),
    ),
)
_USUAL = {
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192,
    "attn_scale": 0.1,
}  # fmt: skip


def _known_settings(config: Config) -> str | None:
    for name, usual in _USUAL.items():
        if config.get(name, usual) != usual:
            return f"{name} is {in_json(config[name])}, and it takes {in_json(usual)}"
    normalized = config["num_experts"] != WITHOUT_NORMS
    if bool(config.get("use_qk_norm")) != normalized:
        given, experts = in_json(config.get("use_qk_norm")), config["num_experts"]
        return f"use_qk_norm is {given}, and with {experts} experts it takes the other"
    return None


def _known_blocks(config: Config) -> str | None:
    blocks = range(count(config, "num_hidden_layers"))
    given = config.get("moe_layers")
    if given is not None and given != [b for b in blocks if _has_experts(config, b)]:
        return "moe_layers is not each block that interleave_moe_layer_step says"
    kinds = ["chunked_attention" if (b + 1) % 4 else "full_attention" for b in blocks]
    if config.get("layer_types") not in (None, kinds):
        return "layer_types is not chunked_attention but for each fourth block"
    return None


_ROW = Architecture(
    "llama4",
    _MODULES,
    with_own(
        keys.LLAMA,
        Key("feed_forward_length", "intermediate_size_mlp"),
        Key("expert_feed_forward_length", "intermediate_size"),
        Key("interleave_moe_layer_step", "interleave_moe_layer_step"),
    ),
    {"num_key_value_heads": 8, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 1,
     "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "use_qk_norm": True,
     "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
     "vocab_size": 202048},
    rope=LLAMA_ROPE,
    refuse=(limits.rope_but_each_fourth, limits.no_biases("attention_bias"), _known_settings,
            _known_blocks),
    warn=(limits.no_dynamic_rope,),
)  # fmt: skip
LLAMA4: dict[str, Architecture] = {
    "Llama4ForCausalLM": _ROW,
    "Llama4ForConditionalGeneration": _ROW,
}
