"""Decoders that attend to latents and have one MLP in each block: Youtu, MiniCPM 3.

Youtu is DeepSeek V3 without experts. MiniCPM 3 makes keys and values of the latents in one matrix,
as its checkpoints do, and multiplies by numbers that llama.cpp takes for granted.
"""

from typing import Any

from qtool.checkpoints.hf_config import WIDTH_BY_HEADS, Config, count, plain_head_width
from qtool.formats.gguf_values import Value, u32
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.latent_attention import (
    DEFAULTS,
    KEYS,
    LATENT_HEADS,
    REFUSE,
    whole_head,
)
from qtool.gguf.architectures.modules import BLOCK, MLP, OUTER, TWO_NORMS, Module, block
from qtool.gguf.architectures.row import OWN_HEADS, Architecture
from qtool.gguf.architectures.sparse_keys import with_own

_YOUTU = (*OUTER, *LATENT_HEADS, *block(*TWO_NORMS, *MLP))
_MINICPM3 = (
    *(m for m in _YOUTU if not m.name.endswith((".q_proj", ".k_b_proj", ".v_b_proj"))),
    Module(BLOCK + "self_attn.kv_b_proj", shape=("plain keys and values", "latents")),
)


def _all_blocks(config: Config) -> Value:
    return u32(count(config, "num_hidden_layers"))


def _inner(config: Config) -> Value:
    return u32(count(config, "intermediate_size"))


def _values(config: Config) -> Value | None:
    """Where they are not what llama.cpp takes without the key."""
    given = count(config, "v_head_dim")
    return None if given == plain_head_width(config) else u32(given)


def _has_query_latents(config: Config) -> str | None:
    return None if config.get("q_lora_rank") else "q_lora_rank is null, and it takes query latents"


def known_longrope(config: Config) -> str | None:
    """Its divisors alone are in a file."""
    rope = config["rope_parameters"]["full_attention"]
    if not rope.get("long_factor"):
        return None
    lengths = rope.get("original_max_position_embeddings"), config.get("max_position_embeddings")
    plain = all(rope.get(name) in (None, 1) for name in ("factor", "attention_factor"))
    if plain and lengths[0] == lengths[1]:
        return None
    return f"its longrope goes from {lengths[0]} tokens to {lengths[1]}, or multiplies attention"


def _rotated_head(config: dict[str, Any]) -> dict[str, Any]:
    """head_dim is what is rotated of a head, as its class has it."""
    return {**config, "head_dim": config["qk_rope_head_dim"]}


# fmt: off
LATENT_MLP: dict[str, Architecture] = {
    "YoutuForCausalLM": Architecture(
        "deepseek2", _YOUTU,
        with_own(
            (key for key in KEYS if not key.name.startswith("expert_")),
            Key("leading_dense_block_count", "", _all_blocks),
            Key("expert_feed_forward_length", "", _inner),
            Key("expert_shared_count", "", lambda _: u32(0)),
        ),
        {**DEFAULTS, "max_position_embeddings": 131072, "vocab_size": 128256,
         "tie_word_embeddings": True},
        rope=("default", "yarn"), yarn=True,
        refuse=(*REFUSE, limits.no_biases("mlp_bias")), warn=(),
    ),
    "MiniCPM3ForCausalLM": Architecture(
        "minicpm3", _MINICPM3,
        (*keys.SIZES, keys.RMS, keys.VOCABULARY, keys.BASE_UNLESS_USUAL,
         Key("attention.q_lora_rank", "q_lora_rank"), Key("attention.kv_lora_rank", "kv_lora_rank"),
         Key("attention.key_length", "", whole_head), Key("attention.value_length", "", _values),
         Key("rope.dimension_count", "qk_rope_head_dim")),
        {**OWN_HEADS, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_rope_head_dim": 32,
         "qk_nope_head_dim": 64, "v_head_dim": WIDTH_BY_HEADS, "scale_emb": 12, "scale_depth": 1.4,
         "dim_model_base": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
         "rope_theta": 1e4, "vocab_size": 73448, "tie_word_embeddings": True},
        rope=("default", "longrope", "su"), settle=_rotated_head,
        refuse=(limits.as_many_key_heads, limits.no_biases("attention_bias", "mlp_bias"),
                _has_query_latents, known_longrope,
                limits.taken(("scale_emb", 12), ("scale_depth", 1.4), ("dim_model_base", 256))),
        warn=(),
    ),
}
# fmt: on
