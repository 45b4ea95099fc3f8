"""Keys that configs and recipes of other quantizers have, and what they are in a recipe here.

Sources: config.json as GPTQModel and AutoAWQ write it (quantization_config), AutoAWQ's
quant_config, llm-compressor's recipes.
"""

# A GGUF file's recipe has keys of its own, and there are two kinds of recipes by that.
GGUF_KEYS = ("type", "pure", "output_type", "embedding_type", "leave_output", "importance")
OTHER_KEYS = (
    "weights", "activations", "kv_cache", "indivisible", "rtn", "awq", "llm_int8", "mlx",
)  # fmt: skip
_DENSE = 'overrides: [{{match: "{}", dense: true}}]'
_BITS = ("bits", "w_bit", "wbits", "num_bits")
_GROUPS = ("group_size", "q_group_size", "groupsize")
_SKIPPED = ("ignore", "modules_to_not_convert", "modules_to_not_quantize")

_SAFETENSORS = {
    **dict.fromkeys(_BITS, "weights.bits"),
    **dict.fromkeys(_GROUPS, "weights.group_size"),
    **dict.fromkeys(("sym", "symmetric"), "weights.symmetric"),
    "zero_point": "weights.symmetric, true where there are no zero points",
    **dict.fromkeys(
        _SKIPPED, _DENSE.format("*.NAME") + "; embeddings and the output head stay dense anyway"
    ),
    "targets": "overrides, each with match and weights; linear layers of the decoder's blocks are "
    "quantized without being named",
    "scheme": "weights and activations, such as weights: {bits: 4, group_size: 128, symmetric: "
    "true}; `qtool recipes` lists recipes for W4A16, W8A8, FP8 and others",
    "desc_act": "gptq.act_order, with gptq.static_groups: false for groups of scattered columns",
    "quant_method": "method and format",
}
_GGUF = {
    **dict.fromkeys((*_BITS, *_GROUPS, "scheme"), "type, such as q4_k_m, which says it all"),
    **dict.fromkeys(_SKIPPED, _DENSE.format("attn_v") + ", with names as in a GGUF file"),
    "targets": "overrides, each with match and type",
    "desc_act": "gptq.act_order",
}


def meant(key: str, *, gguf: bool) -> str:
    """What a key of other programs is called here; nothing where it is not known."""
    return (_GGUF if gguf else _SAFETENSORS).get(key, "")


def foreign_keys(is_gguf: bool) -> tuple[str, ...]:
    """Keys that recipes of this kind do not have, and those of the other do."""
    return OTHER_KEYS if is_gguf else GGUF_KEYS
