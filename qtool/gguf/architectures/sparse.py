"""Decoders whose blocks choose among experts."""

from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.dense import LLAMA, QWEN
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import (
    BLOCK,
    MLP,
    QK_NORMS,
    Module,
    block,
    experts,
)
from qtool.gguf.architectures.row import LLAMA_ROPE, Architecture

QWEN_EXPERTS = experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERT = tuple(name.replace("mlp.", "mlp.shared_expert.") for name in MLP)

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
        refuse=(limits.experts_everywhere, limits.chosen_add_up(True)),
    ),
}
# fmt: on
