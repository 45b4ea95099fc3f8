"""Decoders whose blocks choose among experts."""

from dataclasses import replace

from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.dense import LLAMA, QWEN
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    QK_NORMS,
    Module,
    before,
    block,
    choice_bias,
    experts,
    in_blocks,
    is_mtp,
    since,
    wide_norms,
)
from qtool.gguf.architectures.mtp import AHEAD
from qtool.gguf.architectures.row import LLAMA_ROPE, OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse_keys import with_own
from qtool.gguf.from_hf.row_maps import FIRST_HALF, SECOND_HALF

QWEN_EXPERTS = experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERT = tuple(name.replace("mlp.", "mlp.shared_expert.") for name in MLP)
# Experts after some blocks without, and one that each token visits.
_LEADING = "first_k_dense_replace"
LATER_EXPERTS = (
    *in_blocks(before(_LEADING), block(*MLP)),
    *in_blocks(
        since(_LEADING),
        (
            *experts("mlp.experts", "gate_proj", "up_proj", "down_proj", "n_routed_experts"),
            *block("mlp.gate", *(name.replace("mlp.", "mlp.shared_experts.") for name in MLP)),
        ),
    ),
)
CHOICE_BIAS = in_blocks(since(_LEADING), (choice_bias("mlp.gate.e_score_correction"),))
_NUMBERED = tuple(name.replace("mlp.", "mlp.shared_experts.") for name in MLP)
# Gate and up of all experts in one tensor, under names of their own.
_MIXED = BLOCK + "block_sparse_moe.input_linear"
_OF_EXPERTS = ("experts", "inner", "width")


def _one_by_one(part: str) -> tuple[str, str]:
    return f"{BLOCK}block_sparse_moe.experts.{{i}}.{part}_proj", "num_experts"


GRANITE_EXPERTS = (
    Module(
        _MIXED + ".gate",
        FIRST_HALF,
        within=_MIXED,
        called="ffn_gate_exps",
        shape=_OF_EXPERTS,
        each=_one_by_one("gate"),
    ),
    Module(
        _MIXED + ".up",
        SECOND_HALF,
        within=_MIXED,
        called="ffn_up_exps",
        shape=_OF_EXPERTS,
        each=_one_by_one("up"),
    ),
    Module(
        BLOCK + "block_sparse_moe.output_linear.down",
        called="ffn_down_exps",
        within=BLOCK + "block_sparse_moe.output_linear",
        shape=("experts", "width", "inner"),
        each=_one_by_one("down"),
    ),
    Module(BLOCK + "block_sparse_moe.router.layer", shape=("experts", "width")),
)
_STARTS = "moe_layer_start_index"
_ERNIE = (
    *in_blocks(before(_STARTS), block(*MLP)),
    *in_blocks(
        since(_STARTS),
        (
            *experts("mlp.experts", "gate_proj", "up_proj", "down_proj", "moe_num_experts"),
            *block("mlp.gate"),
            *(Module(BLOCK + name, asked="moe_num_shared_experts") for name in _NUMBERED),
            replace(
                choice_bias("mlp.moe_statics.e_score_correction"), shape=("one", "experts", "one")
            ),
        ),
    ),
)

# fmt: off
SPARSE: dict[str, Architecture] = {
    "MixtralForCausalLM": Architecture(
        "llama",
        (*LLAMA, Module(BLOCK + "block_sparse_moe.gate", also=(BLOCK + "mlp.gate",)),
         *experts("block_sparse_moe.experts", "w1", "w3", "w2")),
        keys.LLAMA,
        {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "vocab_size": 32000},
        rope=LLAMA_ROPE,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2moe",
        (*QWEN, *QWEN_EXPERTS, *block("mlp.gate", "mlp.shared_expert_gate", *SHARED_EXPERT)),
        (*keys.MOE, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
        {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
         "use_sliding_window": False, "decoder_sparse_step": 1},
        needs_head=True,
        refuse=(limits.experts_everywhere, limits.plain_heads, limits.chosen_add_up(False)),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3moe", (*QWEN, *QWEN_EXPERTS, *block(*QK_NORMS, "mlp.gate")), keys.MOE,
        {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
         "moe_intermediate_size": 768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
         "rope_theta": 1e4, "use_sliding_window": False, "decoder_sparse_step": 1},
        refuse=(limits.experts_everywhere, limits.chosen_add_up(True), limits.no_output_bias),
    ),
    "MellumForCausalLM": Architecture(
        "mellum", (*QWEN, *QWEN_EXPERTS, *block(*QK_NORMS, "mlp.gate")),
        with_own(keys.MOE, keys.WINDOW, keys.window_pattern(4, always=True)),
        {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8,
         "moe_intermediate_size": 896, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
         "sliding_window": 1024, "norm_topk_prob": True, "rope_theta": 5e5,
         "rope_local_base_freq": 1e4},
        rope=("default", "yarn"), names="qwen3moe", needs_head=True,
        refuse=(limits.chosen_add_up(True), limits.no_dense_blocks, limits.no_output_bias,
                limits.one_rotation, limits.some_windows),
        warn=(),
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4moe",
        (*QWEN, *LATER_EXPERTS, *CHOICE_BIAS,
         *(Module(BLOCK + name, asked="use_qk_norm") for name in QK_NORMS),
         *in_blocks(is_mtp, AHEAD)),
        sparse_keys.GLM4_MOE,
        {"num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
         "moe_intermediate_size": 1408, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
         "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
         "rope_partial_rotary_factor": 0.5},
        mtp="num_nextn_predict_layers",
    ),
    "SolarOpenForCausalLM": Architecture(  # GLM-4.5 without its norms, and experts in each block
        "glm4moe",
        (*QWEN, *experts("mlp.experts", "gate_proj", "up_proj", "down_proj", "n_routed_experts"),
         *block("mlp.gate", *_NUMBERED), choice_bias("mlp.gate.e_score_correction")),
        with_own(sparse_keys.DOTS1, sparse_keys.ROTATED),
        {"num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128,
         "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "n_shared_experts": 1,
         "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
         "rope_partial_rotary_factor": 1.0},
        refuse=(limits.taken(("first_k_dense_replace", 0)),),
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "minimax-m2",
        (*QWEN, *wide_norms(), Module(BLOCK + "block_sparse_moe.gate"),
         choice_bias("block_sparse_moe.e_score_correction"),
         *experts("block_sparse_moe.experts", "w1", "w3", "w2")),
        sparse_keys.MINIMAX_M2,
        {"num_key_value_heads": 8, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
         "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "rope_theta": 5e6},
        needs_head=True,
    ),
    "Dots1ForCausalLM": Architecture(
        "dots1",
        (*QWEN, *LATER_EXPERTS, *CHOICE_BIAS, *block(*QK_NORMS)),
        sparse_keys.DOTS1,
        {**OWN_HEADS, "moe_intermediate_size": 1408, "first_k_dense_replace": 0,
         "norm_topk_prob": False, "routed_scaling_factor": 1.0, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096},
        needs_head=True,
        refuse=(limits.as_many_key_heads, limits.no_output_bias),
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ernie4_5-moe", (*QWEN, *_ERNIE), sparse_keys.ERNIE,
        {"num_key_value_heads": 4, "moe_num_experts": 64, "num_experts": "moe_num_experts",
         "moe_k": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536,
         "moe_layer_start_index": 1, "moe_layer_interval": 1,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
         "use_bias": False, "tie_word_embeddings": True},
        refuse=(limits.plain_heads, limits.experts_once_they_start, limits.no_biases("use_bias")),
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granitemoe", (*LLAMA, *GRANITE_EXPERTS), keys.GRANITE,
        {**OWN_HEADS, "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_multiplier": 1.0,
         "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
         "vocab_size": 32000},
        rope=LLAMA_ROPE, refuse=(limits.plain_heads,),
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe", (*QWEN, *wide_norms(), *QWEN_EXPERTS, *block("mlp.gate")), keys.USUAL,
        {**OWN_HEADS, "num_experts": 64, "num_experts_per_tok": 8,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
        needs_head=True,
        refuse=(limits.plain_heads, limits.as_many_key_heads, limits.chosen_add_up(False),
                limits.no_clip, limits.no_output_bias),
    ),
}
# fmt: on
