"""The Gemma family: norms of 1 + weight, and a head that is always the embedding."""

from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.modules import (
    FOUR_NORMS,
    MLP,
    OUTER,
    QK_NORMS,
    TWO_NORMS,
    attention,
    block,
    norms_plus_one,
)
from qtool.gguf.architectures.row import GELU, Architecture

_GEMMA = (*OUTER[:2], *attention(), *block(*MLP))

# fmt: off
_GEMMA3 = Architecture(
    "gemma3",
    norms_plus_one((*_GEMMA, OUTER[2], *block(*FOUR_NORMS, *QK_NORMS))),
    keys.GEMMA3,
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
     "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
     "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096,
     "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True},
    activations=GELU,
    refuse=(limits.known_scale(62), limits.no_softcap, limits.no_output_bias),
    warn=(limits.no_dynamic_rope,),
)

GEMMA: dict[str, Architecture] = {
    "GemmaForCausalLM": Architecture(
        "gemma", norms_plus_one((*_GEMMA, *block(*TWO_NORMS))), keys.GEMMA,
        {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True},
        activations=GELU, rope=("default",), refuse=(limits.tied, limits.no_output_bias), warn=(),
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", norms_plus_one((*_GEMMA, *block(*FOUR_NORMS))), keys.GEMMA2,
        {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
         "tie_word_embeddings": True},
        activations=GELU, rope=("default",),
        refuse=(limits.known_scale(46), limits.tied, limits.no_output_bias), warn=(),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}
# fmt: on
