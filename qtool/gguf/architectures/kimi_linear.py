"""Kimi Linear: delta nets whose states forget at a rate for each channel, and attention to latents
without positions in some blocks between.

Released checkpoints name settings otherwise than the class of transformers; both are read.
"""

from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array
from qtool.gguf.architectures import limits, sparse_keys
from qtool.gguf.architectures.keys import BASE, VOCABULARY, Key
from qtool.gguf.architectures.latent_attention import KEYS as LATENT_KEYS
from qtool.gguf.architectures.latent_attention import LATENT_ATTENTION_OF_ONE
from qtool.gguf.architectures.linear_attention import BARE, has_attention, is_linear
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    TWO_NORMS,
    Module,
    before,
    block,
    choice_bias,
    experts,
    in_blocks,
    since,
)
from qtool.gguf.architectures.row import OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse_keys import SIGMOID, gating, with_own
from qtool.gguf.from_hf.value_maps import MINUS_EXP

NAMES = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
_NAMES_OF_NETS = {
    "linear_head_dim": "head_dim", "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size", "linear_lower_bound": "gate_lower_bound",
}  # fmt: skip
_EVERY = 4  # blocks there is one with attention, but the first, unless config.json says otherwise


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """With the settings of delta nets, which released checkpoints have in an object."""
    nets = config.get("linear_attn_config") or {}
    if not isinstance(nets, dict):
        raise SettingError("linear_attn_config", "is not an object")
    return config | {name: nets[older] for name, older in _NAMES_OF_NETS.items() if older in nets}


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    config = flattened(config)
    blocks = count(config, "num_hidden_layers")
    config |= {name: config[older] for name, older in NAMES.items() if older in config}
    if config.get("layer_types") is None:
        full = (config.get("linear_attn_config") or {}).get("full_attn_layers")  # counted from 1
        if full is None:
            full = [b + 1 for b in range(_EVERY, blocks, _EVERY)]
        kinds = ["full_attention" if b + 1 in full else "linear_attention" for b in range(blocks)]
        config["layer_types"] = kinds
    layer_types(config)
    return config


_AT = BLOCK + "self_attn."
_HEADS, _LEADING = "heads of delta nets", "first_k_dense_replace"


def _net(name: str, called: str, *shape: str, named: str = "", **more: Any) -> Module:
    """named: of the table, where attention has one of the checkpoint's name."""
    if named:
        more["within"] = _AT + name
    return Module(_AT + (named or name), called=called, shape=shape, blocks=is_linear, **more)


DELTA_NETS = (
    *(_net(f"{x}_proj", f"attn_{x}", _HEADS, "width", named=f"net.{x}_proj") for x in "qkv"),
    *(_net(f"{x}_conv1d", f"ssm_conv1d_{x}", _HEADS, "one", "kernel") for x in "qkv"),
    _net("f_a_proj", "ssm_f_a", "head of a delta net", "width"),
    _net("f_b_proj", "ssm_f_b", _HEADS, "head of a delta net"),
    _net("g_a_proj", "ssm_g_a", "head of a delta net", "width"),
    _net("g_b_proj", "ssm_g_b", _HEADS, "head of a delta net"),
    _net("b_proj", "ssm_beta", "number of delta nets", "width"),
    _net("dt_bias", "ssm_dt", _HEADS, ends=((".bias", ""),)),
    _net("A_log", "ssm_a", "one", "one", "number of delta nets", "one", ends=BARE,
         values=MINUS_EXP),
    _net("o_norm", "ssm_norm", "head of a delta net"),
    _net("o_proj", "attn_output", "width", _HEADS, named="net.o_proj"),
)  # fmt: skip
_EXPERTS = tuple(
    replace(
        module,
        called=f"ffn_{part}_exps",
        shape=("experts", "width", "inner of experts")
        if part == "down"
        else ("experts", "inner of experts", "width"),
    )
    for module, part in zip(
        experts("block_sparse_moe.experts", "w1", "w3", "w2", "num_experts"),
        ("gate", "up", "down"),
        strict=True,
    )
)
_MODULES = (
    *OUTER,
    *block(*TWO_NORMS),
    *DELTA_NETS,
    *in_blocks(has_attention, LATENT_ATTENTION_OF_ONE),
    # transformers saves these as if they were among the experts.
    *in_blocks(before(_LEADING), tuple(
        replace(module, also=(module.name.replace("mlp", "block_sparse_moe"),))
        for module in block(*MLP)
    )),
    *in_blocks(since(_LEADING), (
        Module(BLOCK + "block_sparse_moe.gate", called="ffn_gate_inp"),
        replace(choice_bias("block_sparse_moe.gate.e_score_correction"), called="exp_probs_b"),
        *_EXPERTS,
        *(Module(f"{BLOCK}block_sparse_moe.shared_experts.{part}_proj",
                 called=f"ffn_{part}_shexp") for part in ("gate", "up", "down")),
    )),
)  # fmt: skip


def key_heads(config: Config) -> Value:
    blocks = range(count(config, "num_hidden_layers"))
    return array(Kind.INT32, [0 if is_linear(config, b) else 1 for b in blocks])


def own_heads(config: Config) -> str | None:
    given, heads = count(config, "linear_num_heads"), count(config, "num_attention_heads")
    if given == heads:
        return None
    return f"there are {given} delta nets in a block, and it takes {heads}, as many as heads"


def _no_query_latents(config: Config) -> str | None:
    given = config.get("q_lora_rank")
    return None if given is None else f"q_lora_rank is {given}, and it has no latents of queries"


_LEFT = ("attention.value_length", "expert_weights_norm", "attention.q_lora_rank")
_KEYS = with_own(
    (key for key in LATENT_KEYS if key.name not in _LEFT and ".scaling." not in key.name),
    BASE,
    VOCABULARY,
    Key("expert_count", "num_experts"),
    Key("attention.head_count_kv", "", key_heads, listed=True, lacking=True),
    Key("attention.value_length", "head_dim"),
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Key("kda.head_dim", "linear_head_dim"),
    gating(SIGMOID),
    sparse_keys.LEADING,
)

KIMI_LINEAR: dict[str, Architecture] = {
    "KimiLinearForCausalLM": Architecture(
        "kimi-linear", _MODULES, _KEYS,
        {**OWN_HEADS, "moe_intermediate_size": 1024, "n_shared_experts": 1, "num_experts": 256,
         "num_experts_per_tok": 8, "routed_scaling_factor": 2.446, "kv_lora_rank": 512,
         "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1,
         "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
         "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "vocab_size": 163840},
        rope=("default",), needs_head=True, settle=_settle,
        refuse=(limits.chosen_add_up(True), limits.no_biases("attention_bias"), limits.dense_first,
                limits.as_many_key_heads, own_heads, _no_query_latents,
                limits.taken(("moe_router_activation_func", "sigmoid"))),
        warn=(limits.one_epsilon,),
    ),
}  # fmt: skip
