"""What mlx-lm's classes of models make of quantized weights, by model_type: how experts are stored,
and what has to stay numbers.

Source: mlx-lm 0.32.2 (sanitize() and __call__ of models/).
"""

from qtool.formats.mlx_experts import STACKED

# Whose sanitize() stacks scales and biases of experts with their codes.
STACKS = frozenset(
    """
    afmoe bailing_hybrid bailing_moe bailing_moe_linear deepseek deepseek_v2 deepseek_v3
    deepseek_v32 dots1 exaone_moe glm4_moe glm4_moe_lite glm_moe_dsa hunyuan jamba
    kimi_k3 kimi_vl laguna
    longcat_flash mimo_v2_flash minimax_m3_vl mistral4 mixtral muse_spark olmoe phimoe phixtral
    qwen2_moe joyai_llm_flash kimi_k2
    """.split()  # noqa: SIM905
)
# Whose classes change weights as they load, and know no codes there.
_PLAIN_ALONE = frozenset(("falcon_h1", "granitemoehybrid"))
# Whose classes compute with the numbers of an embedding that is the head; and of a head, scaled.
_PLAIN_TIED = frozenset(("seed_oss", "llama4", "llama4_text", "minicpm"))
_PLAIN_HEAD = frozenset(("baichuan_m1",))


def refused(kind: str) -> str | None:
    """Why mlx-lm loads nothing quantized of a model type, or None."""
    plain = kind.replace("-", "_") in _PLAIN_ALONE
    return "its class changes weights as it loads, and codes are none" if plain else None


def plain_head(kind: str, tied: bool) -> bool:
    """Whether the head, or the embedding that is it, has to be numbers."""
    kind = kind.replace("-", "_")
    return kind in _PLAIN_HEAD or (tied and kind in _PLAIN_TIED)


def takes_experts(kind: str) -> bool:
    """Whether it is known how a model type's quantized experts are stored."""
    return kind in STACKED or kind.replace("-", "_") in STACKS
