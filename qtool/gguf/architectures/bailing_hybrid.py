"""Ling 3.0: delta nets whose states forget at a rate for each channel, and gated attention to
latents in each last block of a group; experts but in the first blocks.

Released checkpoints and transformers name the same settings otherwise; both are read. Multi-token
prediction is left out.
"""

from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, layer_types, number
from qtool.formats.gguf_values import Kind, Value, array, boolean, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.kimi_linear import DELTA_NETS, NAMES, key_heads
from qtool.gguf.architectures.latent_attention import KEYS as LATENT_KEYS
from qtool.gguf.architectures.latent_attention import LATENT_ATTENTION_OF_ONE
from qtool.gguf.architectures.linear_attention import has_attention, is_linear
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    TWO_NORMS,
    Module,
    block,
    choice_bias,
    in_blocks,
    since,
)
from qtool.gguf.architectures.row import OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse import LATER_EXPERTS
from qtool.gguf.architectures.sparse_keys import SIGMOID, gating, with_own
from qtool.gguf.from_hf.value_maps import EXP


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    blocks = count(config, "num_hidden_layers")
    config |= {name: config[older] for name, older in NAMES.items() if older in config}
    if config.get("layer_types") is None:
        every = count(config, "layer_group_size")
        whole = blocks // every * every
        full = [(b + 1) % every == 0 or b >= whole for b in range(blocks)]
        config["layer_types"] = [f"{'full' if one else 'linear'}_attention" for one in full]
    layer_types(config)
    config.setdefault("linear_head_dim", config.get("head_dim", 128))
    config["head_dim"] = config["linear_head_dim"]  # which transformers says of what is rotated
    config |= {
        "linear_num_heads": config.get("num_attention_heads"),
        "linear_conv_kernel_dim": config.get("short_conv_kernel_size"),
        "n_routed_experts": config.get("num_experts"),
    }
    if config.get("moe_shared_expert_intermediate_size") is None:
        shared = count(config, "n_shared_experts") * count(config, "moe_intermediate_size")
        config["moe_shared_expert_intermediate_size"] = shared
    return config


_AT = BLOCK + "attention."
_HEADS = "heads of delta nets"


def _called(module: Module) -> Module:
    """As these checkpoints call a module of attention."""
    name = module.name.replace("self_attn", "attention").replace("o_proj", "dense")
    within = module.within.replace("self_attn", "attention").replace("o_proj", "dense")
    return replace(module, name=name, within=within)


def _of_net(module: Module) -> Module:
    module = _called(module)
    if module.called != "ssm_a":
        return module
    return replace(module, shape=("number of delta nets", "one"), folded=True, values=EXP)


_FACTORED = ("ssm_f_a", "ssm_f_b", "ssm_g_a", "ssm_g_b")  # in two matrices each, here in one
_MODULES = (
    Module("model.word_embeddings", called="token_embd", shape=("vocabulary", "width")),
    *OUTER[1:],
    *block(*TWO_NORMS),
    *(_of_net(module) for module in DELTA_NETS if module.called not in _FACTORED),
    *in_blocks(is_linear, (
        Module(_AT + "f_proj", called="ssm_f_a", shape=(_HEADS, "width")),
        Module(_AT + "net.g_proj", within=_AT + "g_proj", called="ssm_g_a",
               shape=(_HEADS, "width")),
    )),
    *in_blocks(has_attention, (
        *(replace(_called(module), called=called) for module, called in zip(
            LATENT_ATTENTION_OF_ONE,
            ("attn_q", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_output"),
            strict=True,
        )),
        Module(_AT + "g_proj", called="attn_gate", shape=("number of heads", "width")),
    )),
    *LATER_EXPERTS,
    *in_blocks(since("first_k_dense_replace"), (
        replace(choice_bias("mlp.gate.expert_bias"), ends=((".bias", ""),), shape=("experts",),
                called="exp_probs_b"),
    )),
)  # fmt: skip


def _bounds(name: str, setting: str) -> Key:
    """How large what goes through gates may become, for each block, where that is said."""

    def make(config: Config) -> Value | None:
        given = config.get(setting)
        if given is None:
            return None
        blocks = count(config, "num_hidden_layers")
        each = [0.0 if one is None else number({setting: one}, setting) for one in given]
        return array(Kind.FLOAT32, [*each, *[0.0] * blocks][:blocks])

    return Key(name, "", make, listed=True)


def _listed_bounds(config: Config) -> str | None:
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if not isinstance(config.get(name), list | None):
            return f"{name} is no list, and it takes one"
    return None


def _no_query_latents(config: Config) -> str | None:
    given = config.get("q_lora_rank")
    return None if given is None else f"q_lora_rank is {given}, which the class does not have"


def _known_gate(config: Config) -> str | None:
    given = number(config, "kda_lower_bound")
    return None if given < 0 else f"kda_lower_bound is {given}, and it takes one below zero"


def _shared_as_wide(config: Config) -> str | None:
    given = config["moe_shared_expert_intermediate_size"]
    usual = count(config, "n_shared_experts") * count(config, "moe_intermediate_size")
    return None if given == usual else f"shared experts are {given} wide, and the class has {usual}"


_LEFT = ("attention.q_lora_rank", "attention.value_length", "expert_weights_norm")
_KEYS = with_own(
    (key for key in LATENT_KEYS if key.name not in _LEFT and ".scaling." not in key.name),
    keys.BASE,
    keys.VOCABULARY,
    Key("expert_count", "num_experts"),
    Key("attention.head_count_kv", "", key_heads, listed=True, lacking=True),
    Key("attention.value_length", "", lambda config: u32(count(config, "head_dim"))),
    Key("ssm.conv_kernel", "short_conv_kernel_size"),
    Key("kda.head_dim", "linear_head_dim"),
    Key("kda.safe_gate", "", lambda _: boolean(True), flag=True),
    Key("kda.gate_lower_bound", "kda_lower_bound", real=True),
    Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
    sparse_keys.ADD_UP,
    sparse_keys.LEADING,
    gating(SIGMOID),
    _bounds("swiglu_clamp_exp", "expert_swiglu_limit_list"),
    _bounds("swiglu_clamp_shexp", "share_expert_swiglu_limit_list"),
)
_ROW = Architecture(
    "bailingmoe3", _MODULES, _KEYS,
    {**OWN_HEADS, "moe_intermediate_size": 768, "n_shared_experts": 1, "num_experts": 512,
     "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
     "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
     "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "first_k_dense_replace": 2,
     "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_lower_bound": -5.0,
     "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "vocab_size": 157184,
     "rope_theta": 6e6},
    rope=("default",), names="kimi-linear", settle=_settle,
    refuse=(_no_query_latents, _known_gate, _shared_as_wide, _listed_bounds,
            limits.no_biases("attention_bias"), limits.dense_first, limits.as_many_key_heads,
            limits.taken(("kda_safe_gate", True), ("no_kda_lora", True),
                         ("gated_attention_proj_granularity_type", "head_wise"),
                         ("score_function", "sigmoid"))),
    warn=(limits.one_epsilon,),
)  # fmt: skip
BAILING_HYBRID: dict[str, Architecture] = {
    "BailingHybridForCausalLM": _ROW,
    "BailingMoeV3ForCausalLM": _ROW,
}
