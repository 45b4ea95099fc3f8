"""Settings of attention to latents (DeepSeek, GLM-5, Mistral 4) told by the keys of a GGUF file."""

from collections.abc import Mapping
from typing import Any

from qtool.errors import FormatError
from qtool.formats.gguf_values import Value
from qtool.gguf.architectures import Architecture
from qtool.gguf.source import GgufSource


def attends_to_latents(row: Architecture) -> bool:
    return any(key.name == "attention.key_length_mla" for key in row.keys)


def put_latents(
    row: Architecture,
    named: str,
    config: dict[str, Any],
    given: Mapping[str, Value],
    source: GgufSource,
) -> None:
    """Widths of heads, ranks, and which blocks have experts; FormatError where a head is narrower
    than what is rotated of it."""
    whole, rotated = (
        given[name].value if name in given else 0
        for name in ("attention.key_length_mla", "rope.dimension_count")
    )
    if not 0 < rotated < whole:
        raise FormatError(
            f"{source.path}: {row.name}.rope.dimension_count is {rotated} and "
            f"{row.name}.attention.key_length_mla {whole}; expected the first to be a part of it"
        )
    rank = given.get("attention.q_lora_rank")
    config |= {
        "qk_nope_head_dim": whole - rotated,
        "head_dim": whole if named == "Mistral4ForCausalLM" else rotated,
        "q_lora_rank": None if rank is None else rank.value or None,
        "num_key_value_heads": config["num_attention_heads"],
        "norm_topk_prob": bool(config.get("norm_topk_prob")),
    }
    if named == "YoutuForCausalLM":
        for name in ("norm_topk_prob", "moe_intermediate_size", "num_shared_expert"):
            config.pop(name, None)
    if named == "DeepseekV2ForCausalLM":
        grouped = config.get("n_group", 1) != 1
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"


def put_whole_latents(config: dict[str, Any], given: Mapping[str, Value]) -> None:
    """Of MiniCPM 3, whose heads of values are as wide as usual where no key says so."""
    rotated, values = config["qk_rope_head_dim"], given.get("attention.value_length")
    usual = config["hidden_size"] // config["num_attention_heads"]
    whole = given["attention.key_length"].value if "attention.key_length" in given else usual
    config |= {
        "qk_nope_head_dim": whole - rotated,
        "head_dim": rotated,
        "v_head_dim": usual if values is None else values.value,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
