"""Decoders with experts of the last years: GLM-4.7 Flash, AFMoE (Trinity), EXAONE with experts."""

from dataclasses import replace

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.formats.gguf_values import Value, boolean, string, u32
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.dense import QWEN
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.latent_attention import (
    DEFAULTS,
    KEYS,
    LATENT_MODULES,
    REFUSE,
    scores,
)
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    QK_NORMS,
    Module,
    attention,
    before,
    block,
    choice_bias,
    experts,
    in_blocks,
    is_mtp,
    since,
)
from qtool.gguf.architectures.mtp import AHEAD
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sparse import CHOICE_BIAS
from qtool.gguf.architectures.sparse_keys import SIGMOID, blocks_with, gating, with_own

_SHARED = tuple(name.replace("mlp.", "mlp.shared_experts.") for name in MLP)
_ROUTED = (*experts("mlp.experts", "gate_proj", "up_proj", "down_proj"), *block(*_SHARED))
_NEXT = "num_nextn_predict_layers"


def _ahead(config: Config) -> Value | None:
    return u32(count(config, _NEXT)) if config.get(_NEXT) else None


_AFMOE = (
    *OUTER,
    *attention(),
    Module(BLOCK + "self_attn.gate_proj", shape=("heads", "width")),
    *block(*QK_NORMS, "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm",
           "post_mlp_layernorm"),
    *in_blocks(before("num_dense_layers"), block(*MLP)),
    *in_blocks(since("num_dense_layers"), (
        Module(BLOCK + "mlp.router.gate", shape=("experts", "width")),
        Module(BLOCK + "mlp.expert_bias", ends=((".bias", ""),), shape=("experts",)),
        *_ROUTED,
    )),
)  # fmt: skip


def _windows_but_each_fourth(config: Config) -> str | None:
    kinds = layer_types(config)
    blocks = range(count(config, "num_hidden_layers"))
    usual = ["sliding_attention" if (b + 1) % 4 else "full_attention" for b in blocks]
    if kinds in ([], usual) and (kinds or config.get("global_attn_every_n_layers", 4) == 4):
        return None
    return (
        "layer_types is not each fourth block without a window, which goes without rotation there"
    )


def _grown_embedding(config: Config) -> str | None:
    if config.get("mup_enabled"):
        return None
    return "mup_enabled is false, and it multiplies embeddings by the root of their width"


def _shared_width(config: Config) -> Value:
    return u32(count(config, "moe_intermediate_size") * count(config, "num_shared_experts"))


_LEADING = "first_k_dense_replace"
_EXAONE = (
    *QWEN,
    *block(*QK_NORMS),
    *in_blocks(before(_LEADING), block(*MLP)),
    *in_blocks(since(_LEADING), (
        *block("mlp.gate"),
        replace(choice_bias("mlp.e_score_correction"), called="exp_probs_b",
                also=(BLOCK + "mlp.gate.e_score_correction",)),
        *_ROUTED,
    )),
)  # fmt: skip
_TO_SHARED, _FROM_SHARED = (
    ("inner of shared experts", "width"), ("width", "inner of shared experts"),
)  # fmt: skip
_HUNYUAN = (
    *(replace(m, called="ffn_norm" if m.name.endswith("post_attention_layernorm") else "")
      for m in QWEN),
    *block(*QK_NORMS),
    *in_blocks(before(_LEADING), block(*MLP)),
    *in_blocks(since(_LEADING), (
        Module(BLOCK + "mlp.router.gate", shape=("experts", "width"), called="ffn_gate_inp"),
        Module(BLOCK + "mlp.expert_bias", ends=(("", ""),), shape=("experts",),
               called="exp_probs_b"),
        *experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
        *(Module(f"{BLOCK}mlp.shared_mlp.{part}_proj", called=f"ffn_{part}_shexp", shape=shape)
          for part, shape in (("gate", _TO_SHARED), ("up", _TO_SHARED), ("down", _FROM_SHARED))),
    )),
    *in_blocks(is_mtp, (
        *(m for m in AHEAD if not m.name.endswith("shared_head.norm")),
        Module(BLOCK + "shared_head.norm", also=(BLOCK + "final_layernorm",)),
    )),
)  # fmt: skip

# fmt: off
RECENT: dict[str, Architecture] = {
    "Glm4MoeLiteForCausalLM": Architecture(
        "deepseek2", (*LATENT_MODULES, *CHOICE_BIAS, *in_blocks(is_mtp, AHEAD)),
        with_own((*KEYS, scores(SIGMOID)), blocks_with(_NEXT),
                 Key("nextn_predict_layers", _NEXT, _ahead)),
        {**DEFAULTS, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
         "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1,
         "routed_scaling_factor": 1.8, "norm_topk_prob": True, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 202752, "vocab_size": 154880},
        rope=("default", "yarn"), yarn=True, names="glm-dsa", mtp=_NEXT,
        refuse=(*REFUSE, limits.dense_first), warn=(),
    ),
    "AfmoeForCausalLM": Architecture(
        "afmoe", _AFMOE,
        with_own(
            keys.LLAMA, keys.WINDOW,
            Key("expert_shared_count", "num_shared_experts"),
            Key("expert_feed_forward_length", "moe_intermediate_size"),
            Key("leading_dense_block_count", "num_dense_layers"),
            Key("expert_weights_norm", "", lambda config: boolean(
                bool(config.get("route_norm", True))), flag=True),
            Key("expert_weights_scale", "route_scale", real=True),
            gating(SIGMOID),
        ),
        {"num_key_value_heads": "num_attention_heads", "head_dim": 128, "num_experts": 64,
         "num_experts_per_tok": 6, "num_shared_experts": 2, "num_dense_layers": 1,
         "moe_intermediate_size": 1408, "route_scale": 1.0, "sliding_window": 1024,
         "mup_enabled": False, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
         "rope_theta": 1e4, "vocab_size": 200192},
        rope=("default", "linear", "yarn"),
        refuse=(_windows_but_each_fourth, _grown_embedding, limits.no_biases("attention_bias")),
        warn=(),
    ),
    "ExaoneMoeForCausalLM": Architecture(
        "exaone-moe", _EXAONE,
        with_own(
            keys.MOE, keys.VOCABULARY, keys.WINDOW, keys.window_pattern(4, always=True),
            *sparse_keys.GROUPS, gating(SIGMOID), sparse_keys.ADD_UP, sparse_keys.SCALED,
            sparse_keys.LEADING,
            Key("expert_shared_count", "num_shared_experts"),
            Key("expert_shared_feed_forward_length", "", _shared_width),
            Key("nextn_predict_layers", "", lambda _: u32(0)),
            Key("rope.scaling.type", "", lambda _: string("none")),
        ),
        {"num_key_value_heads": 32, "num_experts": 64, "num_experts_per_tok": 8,
         "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
         "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
         "sliding_window": 4096, "sliding_window_pattern": 4, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 102400},
        rope=("default", "llama3"), needs_head=True,
        refuse=(limits.dense_first, limits.one_group), warn=(),
    ),
    "HYV3ForCausalLM": Architecture(
        "hy_v3", _HUNYUAN,
        with_own(
            keys.MOE, blocks_with(_NEXT), sparse_keys.NEXTN, sparse_keys.LEADING,
            gating(SIGMOID),
            Key("expert_shared_feed_forward_length", "", _shared_width),
            Key("expert_shared_count", "num_shared_experts"),
            Key("expert_weights_norm", "", lambda config: boolean(
                bool(config.get("route_norm", True))), flag=True),
            Key("expert_weights_scale", "router_scaling_factor", real=True),
        ),
        {"num_key_value_heads": 8, "head_dim": 128, "num_experts": 192, "num_experts_per_tok": 8,
         "num_shared_experts": 1, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0},
        names="glm4moe", mtp=_NEXT, rope=("default", "linear", "yarn"),
        refuse=(limits.dense_first, limits.no_biases("attention_bias", "mlp_bias")), warn=(),
    ),
}
# fmt: on
