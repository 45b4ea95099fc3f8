"""DBRX: experts in each block, each matrix of all of them in one tensor of two axes.

checkpoint  w1, v1, w2 [experts * inner, width]
gguf        gate, up [experts, inner, width]   down [experts, width, inner]: w2 transposed
"""

from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, number
from qtool.formats.gguf_values import Value, f32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import Module
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.from_hf.cuts import Cut

_AT = "transformer.blocks.{b}."
_MLP = _AT + "ffn.experts.mlp."
_BARE = ((".weight", ""),)


def _cut(module: Module, config: Config) -> Module:
    inner = count(config, "intermediate_size")
    transposed = module.called == "ffn_down_exps"
    return replace(module, cut=Cut(count(config, "num_experts"), inner, 0, inner, transposed))


def _experts(name: str, called: str, *shape: str) -> Module:
    return Module(
        _MLP + name, within=_MLP + name, ends=_BARE, fit=_cut, called=called,
        shape=("experts", *shape),
    )  # fmt: skip


_DBRX = (
    Module("transformer.wte", shape=("vocabulary", "width")),
    Module("transformer.norm_f", shape=("width",)),
    Module("lm_head"),
    Module(_AT + "norm_attn_norm.norm_1", shape=("width",)),
    Module(_AT + "norm_attn_norm.attn.Wqkv", shape=("queries, keys, values", "width")),
    Module(_AT + "norm_attn_norm.attn.out_proj", shape=("width", "width")),
    Module(_AT + "norm_attn_norm.norm_2", shape=("width",)),
    Module(_AT + "ffn.router.layer", shape=("experts", "width")),
    _experts("w1", "ffn_gate_exps", "inner", "width"),
    _experts("v1", "ffn_up_exps", "inner", "width"),
    _experts("w2", "ffn_down_exps", "width", "inner"),
)
_EPSILON = 1e-5  # which no setting says
# Settings of the two objects inside config.json by the names that others have for them.
OF_ATTENTION = {"num_key_value_heads": "kv_n_heads", "clip_qkv": "clip_qkv"}
OF_EXPERTS = {
    "intermediate_size": "ffn_hidden_size", "num_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "moe_normalize_expert_weights": "moe_normalize_expert_weights",
}  # fmt: skip
OLD_SIZES = {
    "hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
}  # fmt: skip
_USUAL = {
    "kv_n_heads": 1, "ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1,
    "moe_normalize_expert_weights": 1.0,
}  # fmt: skip


def _part(config: Config, name: str) -> Config:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """What counts of the two objects, in their place. rope_theta inside attn_config is what the
    model was trained with."""
    attention, experts = _part(config, "attn_config"), _part(config, "ffn_config")
    found = {
        key: value for key, value in config.items() if key not in ("attn_config", "ffn_config")
    }
    for part, names in ((attention, OF_ATTENTION), (experts, OF_EXPERTS)):
        for name, there in names.items():
            found[name] = part.get(there, config.get(name, _USUAL.get(there)))
    act, rope = experts.get("ffn_act_fn"), config["rope_parameters"]
    found["hidden_act"] = act.get("name") if isinstance(act, dict) else "silu"
    full = rope["full_attention"]
    if attention.get("rope_theta") is not None:
        full = {**full, "rope_theta": attention["rope_theta"]}
    return {**found, "rope_parameters": {**rope, "full_attention": full}}


def _clamp(config: Config) -> Value:
    """llama.cpp asks for it, and clamps nothing at zero."""
    return f32(0.0 if config.get("clip_qkv") is None else number(config, "clip_qkv"))


DBRX: dict[str, Architecture] = {
    "DbrxForCausalLM": Architecture(
        "dbrx", _DBRX,
        (*(key for key in keys.SIZES if key.name != "context_length"), keys.BASE,
         Key("context_length", "max_seq_len"),
         Key("attention.clamp_kqv", "attn_config", _clamp),
         Key("expert_count", "num_experts"), Key("expert_used_count", "num_experts_per_tok"),
         Key("attention.layer_norm_epsilon", "", lambda _: f32(_EPSILON))),
        {"max_seq_len": 2048, "rope_theta": 1e4},
        rope=("default",), needs_head=True, settle=_settled,
        refuse=(limits.taken(("moe_normalize_expert_weights", 1.0)), limits.plain_heads), warn=(),
    ),
}  # fmt: skip
