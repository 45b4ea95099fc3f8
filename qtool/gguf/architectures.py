"""Which checkpoints can be written as GGUF: one row per architecture of transformers.

A row says what llama.cpp calls the architecture, which modules a checkpoint has and how their rows
lie (`arch_modules`), which metadata keys come from which settings (`arch_keys`), what the settings
are where config.json is silent, and what llama.cpp cannot do (`arch_limits`). GGUF names of tensors
come from the gguf package's TensorNameMap. Nothing here reads a tensor; conversion in both
directions reads this table. Source: llama.cpp (conversion/, src/models/) and the configuration
classes of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qtool.errors import UnsupportedError
from qtool.gguf import arch_keys as keys
from qtool.gguf import arch_limits as limits
from qtool.gguf.arch_keys import Key
from qtool.gguf.arch_limits import Limit
from qtool.gguf.arch_modules import (
    BLOCK,
    FOUR_NORMS,
    HEADS,
    MLP,
    OUTER,
    QK_NORMS,
    TWO_NORMS,
    Module,
    attention,
    block,
    experts,
    head_norms,
    neox,
    norms_plus_one,
    wide_norms,
)
from qtool.gguf.hf_config import WIDTH_BY_HEADS, Config
from qtool.gguf.row_maps import QKV_BY_KIND


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    name: str  # general.architecture
    modules: tuple[Module, ...]
    keys: tuple[Key, ...]
    # Of the class in transformers; a string names what stands in for null.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: tuple[str, ...] = ("silu",)  # that llama.cpp computes
    rope: tuple[str, ...] = ("default", "linear", "yarn", "dynamic")  # scaling it can be told of
    needs_head: bool = False  # llama.cpp never takes the embedding
    refuse: tuple[Limit, ...] = ()
    warn: tuple[Limit, ...] = (limits.no_window, limits.no_dynamic_rope)

    @property
    def drops_head(self) -> bool:
        """Whether llama.cpp always takes the embedding for the head."""
        return all(module.name not in HEADS for module in self.modules)


_LLAMA = (*OUTER, *attention(pairs=True), *block(*TWO_NORMS))
_QWEN = (*OUTER, *attention(), *block(*TWO_NORMS))
_GEMMA = (*OUTER[:2], *attention(), *block(*MLP))  # the head is always the embedding
_QWEN_EXPERTS = experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
_SHARED_EXPERT = tuple(name.replace("mlp.", "mlp.shared_expert.") for name in MLP)
_HEADS = {"num_key_value_heads": "num_attention_heads"}
_LLAMA_ROPE = ("default", "linear", "yarn", "dynamic", "llama3")
_GELU = ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")

# fmt: off
_GEMMA3 = Architecture(
    "gemma3",
    norms_plus_one((*_GEMMA, OUTER[2], *block(*FOUR_NORMS, *QK_NORMS))),
    keys.GEMMA3,
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
     "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
     "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096,
     "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True},
    activations=_GELU,
    refuse=(limits.known_scale(62), limits.no_softcap),
    warn=(limits.no_dynamic_rope,),
)

TABLE: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "llama", (*_LLAMA, *block(*MLP)), keys.LLAMA,
        {**_HEADS, "head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": 32000},
        rope=_LLAMA_ROPE,
    ),
    "MistralForCausalLM": Architecture(
        "llama", (*_LLAMA, *block(*MLP)), keys.LLAMA,
        {"num_key_value_heads": 8, "head_dim": WIDTH_BY_HEADS, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096, "vocab_size": 32000},
        rope=_LLAMA_ROPE,
    ),
    "MixtralForCausalLM": Architecture(
        "llama",
        (*_LLAMA, Module(BLOCK + "block_sparse_moe.gate", also=(BLOCK + "mlp.gate",)),
         *experts("block_sparse_moe.experts", "w1", "w3", "w2")),
        keys.LLAMA,
        {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "vocab_size": 32000},
        rope=_LLAMA_ROPE,
    ),
    "Qwen2ForCausalLM": Architecture(  # 2.5 as well
        "qwen2", (*_QWEN, *block(*MLP)), keys.USUAL,
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
         "rope_theta": 1e4, "use_sliding_window": False},
        refuse=(limits.plain_heads,),
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", (*_QWEN, *block(*QK_NORMS, *MLP)), keys.USUAL,
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "use_sliding_window": False},
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2moe",
        (*_QWEN, *_QWEN_EXPERTS, *block("mlp.gate", "mlp.shared_expert_gate", *_SHARED_EXPERT)),
        (*keys.MOE, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
        {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
         "use_sliding_window": False, "decoder_sparse_step": 1},
        needs_head=True,
        refuse=(limits.experts_everywhere, limits.plain_heads, limits.chosen_add_up(False)),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3moe", (*_QWEN, *_QWEN_EXPERTS, *block(*QK_NORMS, "mlp.gate")), keys.MOE,
        {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
         "moe_intermediate_size": 768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
         "rope_theta": 1e4, "use_sliding_window": False, "decoder_sparse_step": 1},
        refuse=(limits.experts_everywhere, limits.chosen_add_up(True)),
    ),
    "GemmaForCausalLM": Architecture(
        "gemma", norms_plus_one((*_GEMMA, *block(*TWO_NORMS))), keys.GEMMA,
        {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True},
        activations=_GELU, rope=("default",), refuse=(limits.tied,), warn=(),
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", norms_plus_one((*_GEMMA, *block(*FOUR_NORMS))), keys.GEMMA2,
        {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
         "tie_word_embeddings": True},
        activations=_GELU, rope=("default",),
        refuse=(limits.known_scale(46), limits.tied), warn=(),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Architecture(
        "phi3",
        (*OUTER, *block("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj",
                        "mlp.down_proj", *TWO_NORMS)),
        keys.PHI3,
        {**_HEADS, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
         "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_partial_rotary_factor": 1.0,
         "sliding_window": None},
        rope=("default", "longrope", "su", "yarn"),
        refuse=(limits.plain_heads,), warn=(limits.no_window,),
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3", (*_LLAMA, *block(*MLP)), keys.LLAMA,
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
         "rope_theta": 2e6, "tie_word_embeddings": True, "use_sliding_window": False,
         "vocab_size": 128256, "no_rope_layer_interval": 4},
        refuse=(limits.rope_but_each_fourth,),
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2",
        (*OUTER, *attention(), *wide_norms(),
         *block("post_attention_layernorm", "post_feedforward_layernorm", *MLP)),
        keys.USUAL,
        {**_HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
        needs_head=True,
        refuse=(limits.plain_heads,), warn=(limits.no_dynamic_rope,),
    ),
    "GraniteForCausalLM": Architecture(
        "granite", (*_LLAMA, *block(*MLP)), keys.GRANITE,
        {**_HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
         "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
         "logits_scaling": 1.0, "vocab_size": 32000},
        rope=_LLAMA_ROPE,
    ),
    "StableLmForCausalLM": Architecture(
        "stablelm",
        (*OUTER, *attention(), *head_norms(), *block("input_layernorm", *MLP),
         Module(BLOCK + "post_attention_layernorm", needed=False)),
        keys.PARALLEL,
        {"num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
         "rope_theta": 1e4, "rope_partial_rotary_factor": 0.25, "use_parallel_residual": False},
        rope=("default",), needs_head=True,
        refuse=(limits.plain_heads,), warn=(),
    ),
    "GPTNeoXForCausalLM": Architecture(
        "gptneox",
        (Module("gpt_neox.embed_in"), Module("gpt_neox.final_layer_norm"),
         Module("embed_out", needed=False),
         *neox(*TWO_NORMS, "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
         Module("gpt_neox.layers.{b}.attention.query_key_value", QKV_BY_KIND)),
        keys.PARALLEL,
        {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 1e4,
         "rope_partial_rotary_factor": 0.25, "use_parallel_residual": True},
        activations=_GELU, rope=("default",), needs_head=True, warn=(),
    ),
}
# fmt: on


def architecture_of(config: Config, where: str) -> Architecture:
    """The row for a checkpoint; UnsupportedError names the table for one that is not in it."""
    named = config.get("architectures")
    found = str(named[0]) if isinstance(named, list) and named else None
    if found in TABLE:
        return TABLE[found]
    if found is None:
        raise UnsupportedError(
            f"{where}: config.json names no architecture; to be written as GGUF, `architectures` "
            f"should be a list with one of {', '.join(TABLE)}"
        )
    raise UnsupportedError(
        f"{where}: config.json names the architecture {found}, which is not in the table of what "
        f"can be written as GGUF ({', '.join(TABLE)}); a new one is a few lines of "
        "qtool/gguf/architectures.py"
    )
