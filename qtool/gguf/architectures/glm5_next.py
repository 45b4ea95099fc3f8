"""GLM-5.3: delta nets of Kimi Linear, and attention without positions to latents that an indexer
has chosen by pools of tokens, between four residual streams. Multi-token prediction is left
out.

What each stream keeps of the others is a matrix whose rows and columns add up to one, so that a
block has three weights of streams:

    hc_fn [(2 + streams) * streams, streams * width], hc_base [...], hc_scale [3]
"""

from dataclasses import replace
from typing import Any

from qtool.checkpoints.hf_config import Config, count, layer_types
from qtool.formats.gguf_values import Value, boolean, f32, u32
from qtool.gguf.architectures import limits, sparse_keys
from qtool.gguf.architectures.hy_v4 import BOUND, bounded, streams
from qtool.gguf.architectures.indexed import INDEXER, INDEXER_KEYS, is_full
from qtool.gguf.architectures.keys import MOE, VOCABULARY, Key
from qtool.gguf.architectures.kimi_linear import DELTA_NETS, flattened, key_heads, own_heads
from qtool.gguf.architectures.latent_attention import LATENT_ATTENTION_OF_QUERIES, latents
from qtool.gguf.architectures.linear_attention import has_attention
from qtool.gguf.architectures.modules import BLOCK, OUTER, TWO_NORMS, Module, block, in_blocks
from qtool.gguf.architectures.row import OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse import CHOICE_BIAS, LATER_EXPERTS
from qtool.gguf.architectures.sparse_keys import SIGMOID, gating, with_own

_BARE = ((".weight", ""),)
_EVERY = 4  # blocks, of which the last has attention, unless config.json says otherwise
_STREAMS = 4  # that llama.cpp has


def _settle(config: dict[str, Any]) -> dict[str, Any]:
    config = flattened(config)
    blocks = count(config, "num_hidden_layers")
    usual = ["full" if b % _EVERY == _EVERY - 1 else "linear" for b in range(blocks)]
    kinds = layer_types(config) or [f"{kind}_attention" for kind in usual]
    config["layer_types"] = [k if k == "linear_attention" else "full_attention" for k in kinds]
    return config


def _has_indexer(config: Config, b: int) -> bool:
    return has_attention(config, b) and is_full(config, b)


_AT = BLOCK + "self_attn.indexer.index_kpool_compress_"
_INDEXER = (
    *INDEXER,
    Module(_AT + "gate", called="indexer_compressor_gate", ends=_BARE,
           shape=("indexer's key", "width")),
    Module(_AT + "ape", called="indexer_compressor_ape", ends=_BARE,
           shape=("pool", "indexer's key")),
)  # fmt: skip
_MODULES = (
    *OUTER,
    *block(*TWO_NORMS),
    *(replace(m, shape=("number of delta nets",)) if m.called == "ssm_a" else m
      for m in DELTA_NETS),
    *in_blocks(has_attention, LATENT_ATTENTION_OF_QUERIES),
    *in_blocks(_has_indexer, _INDEXER),
    *streams(BLOCK + "hc_attn", BLOCK + "attn_hc", "hc_attn", mixed=True),
    *streams(BLOCK + "hc_ffn", BLOCK + "ffn_hc", "hc_ffn", mixed=True),
    *LATER_EXPERTS,
    *CHOICE_BIAS,
)  # fmt: skip


def _lower_bound(config: Config) -> Value | None:
    """How slowly states forget at most, as an exponent."""
    given = config.get("linear_lower_bound")
    return None if given is None else f32(float(given))


def _whole_head(config: Config) -> Value:
    return u32(count(config, "qk_nope_head_dim"))


def _known(config: Config) -> str | None:
    for name, expected in (("hc_mult", _STREAMS), ("qk_rope_head_dim", 0), ("mhc", True)):
        if config.get(name, expected) != expected:
            return f"{name} is {config[name]}, and it takes {expected}"
    if count(config, "index_kpool") == 1:
        return "index_kpool is 1, and it takes pools of several tokens"
    blocks = range(count(config, "num_hidden_layers"))
    attending = [b for b in blocks if has_attention(config, b)]
    if attending and not is_full(config, attending[0]):
        return "the first indexer is shared, and there is none before it to share with"
    return None


_KEYS = with_own(
    (key for key in MOE if not key.name.startswith("rope.")),
    VOCABULARY,
    Key("expert_count", "n_routed_experts"),
    *sparse_keys.GROUPS,
    sparse_keys.SHARED_COUNT,
    sparse_keys.LEADING,
    sparse_keys.ADD_UP,
    sparse_keys.SCALED,
    gating(SIGMOID),
    Key("attention.head_count_kv", "", key_heads, listed=True, lacking=True),
    Key("attention.layer_norm_epsilon", "", lambda _: f32(1e-6), real=True),
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Key("kda.head_dim", "linear_head_dim"),
    Key("kda.gate_lower_bound", "", _lower_bound, real=True),
    Key("attention.q_lora_rank", "q_lora_rank"),
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("rope.dimension_count", "", lambda _: u32(0)),
    Key("attention.key_length", "", latents),
    Key("attention.value_length", "", latents),
    Key("attention.key_length_mla", "", _whole_head),
    Key("attention.value_length_mla", "v_head_dim"),
    *INDEXER_KEYS,
    Key("attention.indexer.kpool", "index_kpool"),
    Key("attention.indexer.kpool_select_tail", "", lambda config: boolean(
        bool(config.get("index_kpool_always_select_tail", True))), flag=True),
    Key("hyper_connection.count", "hc_mult"),
    Key("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
    Key("hyper_connection.epsilon", "hc_eps", real=True),
    BOUND,
    replace(BOUND, name="swiglu_clamp_shexp"),
)  # fmt: skip

GLM5_NEXT: dict[str, Architecture] = {
    "Glm5NextForConditionalGeneration": Architecture(
        "glm5-next", _MODULES, _KEYS,
        {**OWN_HEADS, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 0,
         "qk_nope_head_dim": 256, "v_head_dim": 256, "first_k_dense_replace": 3,
         "n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
         "n_group": 1, "topk_group": 1, "index_topk": 2048, "index_head_dim": 128,
         "index_n_heads": 32, "index_kpool": 16, "swiglu_limit": 10.0, "linear_head_dim": 128,
         "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0,
         "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 1048576, "vocab_size": 154880},
        rope=("default",), names="glm-dsa", needs_head=True, settle=_settle,
        refuse=(limits.no_biases("attention_bias"), limits.dense_first, own_heads, _known, bounded,
                limits.taken(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))),
        warn=(limits.one_epsilon,),
    ),
}  # fmt: skip
