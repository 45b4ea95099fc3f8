"""Decoders with one MLP in each block."""

from qtool.checkpoints.hf_config import WIDTH_BY_HEADS
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    OUTER,
    QK_NORMS,
    TWO_NORMS,
    Module,
    attention,
    block,
    wide_norms,
)
from qtool.gguf.architectures.mtp import MTP, MTP_MODULES
from qtool.gguf.architectures.row import LLAMA_ROPE, OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse_keys import NEXTN_OF_MTP, blocks_with, with_own

LLAMA = (*OUTER, *attention(pairs=True), *block(*TWO_NORMS))
QWEN = (*OUTER, *attention(), *block(*TWO_NORMS))

# fmt: off
_ERNIE = Architecture(
    "ernie4_5", (*QWEN, *block(*MLP)), keys.USUAL,
    {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
     "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
    refuse=(limits.no_biases("use_bias"),), warn=(limits.no_dynamic_rope,),
)

DENSE: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "llama", (*LLAMA, *block(*MLP)), keys.LLAMA,
        {**OWN_HEADS, "head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": 32000},
        rope=LLAMA_ROPE,
    ),
    "InternLM3ForCausalLM": Architecture(
        "llama", (*LLAMA, *block(*MLP)), keys.LLAMA,
        {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768,
         "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 128512},
        rope=LLAMA_ROPE, warn=(limits.no_dynamic_rope,),
    ),
    "MistralForCausalLM": Architecture(
        "llama", (*LLAMA, *block(*MLP)), keys.LLAMA,
        {"num_key_value_heads": 8, "head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096, "vocab_size": 32000},
        rope=LLAMA_ROPE,
    ),
    "Qwen2ForCausalLM": Architecture(  # 2.5 as well
        "qwen2", (*QWEN, *block(*MLP)), keys.USUAL,
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
         "rope_theta": 1e4, "use_sliding_window": False},
        refuse=(limits.plain_heads,),
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", (*QWEN, *block(*QK_NORMS, *MLP)), keys.USUAL,
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "use_sliding_window": False},
        refuse=(limits.no_output_bias,),
    ),
    "ApertusForCausalLM": Architecture(
        "apertus",
        (*OUTER, *attention(), *block(*QK_NORMS, "mlp.up_proj", "mlp.down_proj"),
         Module(BLOCK + "attention_layernorm", shape=("width",), called="attn_norm"),
         Module(BLOCK + "feedforward_layernorm", shape=("width",), called="ffn_norm")),
        keys.LLAMA,
        {**OWN_HEADS, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "vocab_size": 131072,
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
                             "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0}},
        activations=("xielu",), rope=LLAMA_ROPE, needs_head=True,
        learned={f"xielu.{name}": f"{BLOCK}mlp.act_fn.{name}"
                 for name in ("alpha_n", "alpha_p", "beta", "eps")},
        refuse=(limits.no_biases("attention_bias", "mlp_bias"),), warn=(limits.no_dynamic_rope,),
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        (*OUTER, *block("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj",
                        "mlp.down_proj", *TWO_NORMS)),
        keys.PHI3,
        {**OWN_HEADS, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
         "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_partial_rotary_factor": 1.0,
         "sliding_window": None},
        rope=("default", "longrope", "su", "yarn"),
        refuse=(limits.plain_heads,), warn=(limits.no_window,),
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3", (*LLAMA, *block(*MLP)), keys.LLAMA,
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
         "rope_theta": 2e6, "tie_word_embeddings": True, "use_sliding_window": False,
         "vocab_size": 128256, "no_rope_layer_interval": 4},
        refuse=(limits.rope_but_each_fourth, limits.no_output_bias),
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2",
        (*OUTER, *attention(), *wide_norms(),
         *block("post_attention_layernorm", "post_feedforward_layernorm", *MLP)),
        keys.USUAL,
        {**OWN_HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
        needs_head=True,
        refuse=(limits.plain_heads, limits.no_output_bias), warn=(limits.no_dynamic_rope,),
    ),
    "Olmo3ForCausalLM": Architecture(
        "olmo2",
        (*OUTER, *attention(), *wide_norms(),
         *block("post_attention_layernorm", "post_feedforward_layernorm", *MLP)),
        (*keys.USUAL, keys.WINDOW, keys.window_pattern(4, always=True)),
        {**OWN_HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
         "rope_local_base_freq": 5e5, "sliding_window": 4096},
        needs_head=True,
        refuse=(limits.plain_heads, limits.no_biases("attention_bias"), limits.one_rotation),
        warn=(limits.no_dynamic_rope,),
    ),
    "SeedOssForCausalLM": Architecture(
        "seed_oss", (*QWEN, *block(*MLP)), keys.USUAL,
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        refuse=(limits.no_biases("attention_out_bias", "mlp_bias"),),
        warn=(limits.no_dynamic_rope,),
    ),
    "Exaone4ForCausalLM": Architecture(
        "exaone4",
        (*OUTER, *attention(), *block("post_attention_layernorm", "post_feedforward_layernorm",
                                      *QK_NORMS, *MLP), *MTP_MODULES),
        (*with_own(keys.USUAL, blocks_with(MTP)), keys.VOCABULARY, NEXTN_OF_MTP,
         keys.WINDOW, keys.window_pattern(4, always=True)),
        {"num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
         "rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4,
         "vocab_size": 102400},
        rope=LLAMA_ROPE,
        refuse=(limits.plain_heads, limits.windows_of_64_blocks), warn=(limits.no_dynamic_rope,),
        mtp=MTP,  # 4.5 does
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_ForCausalLM": _ERNIE,
    "GlmForCausalLM": Architecture(
        "chatglm", (*QWEN, *block("mlp.gate_up_proj", "mlp.down_proj")),
        (*keys.SIZES, *keys.SCALING, keys.BASE, keys.RMS, keys.ROTATED_OF_HEAD),
        {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
         "rms_norm_eps": 1.5625e-07, "rope_theta": 1e4, "rope_partial_rotary_factor": 0.5},
        refuse=(limits.plain_heads,), warn=(limits.no_dynamic_rope,),
    ),
    "ArceeForCausalLM": Architecture(
        "arcee", (*LLAMA, *block("mlp.up_proj", "mlp.down_proj")), keys.LLAMA,
        {**OWN_HEADS, "head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 4096,
         "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 32000},
        activations=("relu2",), rope=LLAMA_ROPE,
        refuse=(limits.no_biases("attention_bias", "mlp_bias"),), warn=(limits.no_dynamic_rope,),
    ),
    "GraniteForCausalLM": Architecture(
        "granite", (*LLAMA, *block(*MLP)), keys.GRANITE,
        {**OWN_HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
         "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
         "logits_scaling": 1.0, "vocab_size": 32000},
        rope=LLAMA_ROPE,
    ),
}
# fmt: on
