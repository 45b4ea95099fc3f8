"""config.json told by the metadata of a GGUF file: the inverse of the table's keys.

The table says how each key follows from config.json. Here the settings are put back, and then the
table is asked for the keys once more: what does not come out as the file has it is an error, so
that nothing is lost between the two.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.architectures import TABLE, Architecture
from qtool.gguf.from_hf import gguf_names
from qtool.gguf.hf_config import complete
from qtool.gguf.rope_tensors import llama3_divisors
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf_biases import bias_settings
from qtool.gguf.to_hf_keys import WHOLE, checked_keys

# model_type of transformers where it is not the architecture's name in llama.cpp.
_MODEL_TYPES = {
    "MixtralForCausalLM": "mixtral", "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe", "Gemma3ForCausalLM": "gemma3_text",
    "GPTNeoXForCausalLM": "gpt_neox", "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2", "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
}  # fmt: skip
_TOKEN_IDS = {
    "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}  # fmt: skip
# What a checkpoint has in one tensor and a file in several, by architecture.
_NOT_YET_JOINED = {
    "deepseek2": "what makes keys and values of latents in one matrix",
    "gpt-oss": "gate and up of experts in turns in one tensor",
    **dict.fromkeys(("granitemoe", "llama4"), "gate and up of experts in one tensor"),
}
_MOST_SLOWED = 1e9  # times, by a rotation's divisor
_LLAMA3_LENGTHS = tuple(1 << k for k in range(5, 20))


def class_of(source: GgufSource) -> str:
    """The class of transformers that computes what llama.cpp's architecture does."""
    name = source.architecture
    experts = source.metadata.get(f"{name}.expert_count")
    if name == "llama" and experts is not None and experts.value != 0:
        return "MixtralForCausalLM"
    if name == "qwen3next":
        raise UnsupportedError(
            f"{source.path}: of the architecture qwen3next a checkpoint keeps queries, keys, "
            "values and gates of linear attention mixed in one matrix, which cannot be put "
            "together again yet; use the checkpoint that the file was made of"
        )
    if name in _NOT_YET_JOINED:
        raise UnsupportedError(
            f"{source.path}: of the architecture {name} a checkpoint keeps "
            f"{_NOT_YET_JOINED[name]}, which cannot be put together again yet; use the checkpoint "
            "that the file was made of"
        )
    for found, row in TABLE.items():
        if row.name == name:
            return found
    known = ", ".join(sorted({row.name for row in TABLE.values()}))
    raise UnsupportedError(
        f"{source.path}: the architecture {name!r} is not in the table of what can be written as a "
        f"Hugging Face checkpoint ({known})"
    )


def hf_config(
    source: GgufSource, vectors: Mapping[str, NDArray[np.float32]], dtype: str
) -> dict[str, Any]:
    """config.json; `vectors` are the tensors that hold rotation factors, by GGUF name.

    FormatError where the keys make no sense, UnsupportedError where transformers cannot be told
    what the file asks for.
    """
    named = class_of(source)
    row = TABLE[named]
    rows = {tensor.name: tensor.rows for tensor in source.tensors}
    if "token_embd.weight" not in rows:
        raise FormatError(f"{source.path}: lacks token_embd.weight, which every model has")
    given = checked_keys(source, row)
    config: dict[str, Any] = {
        "architectures": [named],
        "model_type": _MODEL_TYPES.get(named, row.name),
        "torch_dtype": dtype,
        "vocab_size": rows["token_embd.weight"],
        "tie_word_embeddings": row.drops_head or "output.weight" not in rows,
    }
    if "num_key_value_heads" in row.defaults:  # where llama.cpp has another default
        config["num_key_value_heads"] = given["attention.head_count"].value
    if isinstance(row.defaults.get("head_dim"), int):
        heads = given["attention.head_count"].value
        config["head_dim"] = given["embedding_length"].value // heads
    for key in row.keys:
        if key.make is None and key.name in given:
            value = plain(given[key.name])  # of a whole number, if another writer's
            config[key.setting] = float(value) if key.real else value
    for name, value in given.items():
        if name in _SETTINGS:
            _SETTINGS[name](config, plain(value))
    if row.predicts:
        config["num_hidden_layers"] = given["block_count"].value - config.get(row.predicts, 0)
    put_layer_types(row, config, given)
    _put_rope(row, config, given, vectors, source)
    config |= bias_settings(row, rows.keys(), source)
    _put_own(row, config, rows.keys())
    _put_asked(row, config, rows.keys())
    config |= token_ids(source, config["vocab_size"])
    _prove(row, config, source)
    return config


def token_ids(source: GgufSource, vocabulary: int) -> dict[str, int | None]:
    """Ids by their names in config.json.

    None, not left out, where there is none: the default of a class may lie outside of a small
    vocabulary.
    """
    found: dict[str, int | None] = {}
    for name, key in _TOKEN_IDS.items():
        value = source.metadata.get(f"tokenizer.ggml.{key}")
        found[name] = None if value is None else value.value
        if value is not None and not (value.kind in WHOLE and 0 <= value.value < vocabulary):
            raise FormatError(
                f"{source.path}: tokenizer.ggml.{key} is {value.value!r}, expected a token below "
                f"{vocabulary}"
            )
    return found


def plain(value: Value) -> Any:
    """A value for JSON; a float32 as the shortest decimal that means it."""
    if value.kind == Kind.FLOAT32:
        return float(str(np.float32(value.value)))
    if value.kind == Kind.ARRAY:
        return [plain(Value(value.element or Kind.INT32, item)) for item in value.value]
    return value.value


def _to(setting: str, change: Callable[[Any], Any] = lambda value: value) -> Callable[..., None]:
    def put(config: dict[str, Any], value: Any) -> None:
        config[setting] = change(value)

    return put


def _put_inner_size(config: dict[str, Any], value: Any) -> None:
    config["linear_value_head_dim"] = value // max(1, config.get("linear_num_value_heads", 1))


# Keys of the table that are made of a setting in their own way, and how to get that back.
_SETTINGS: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "use_parallel_residual": _to("use_parallel_residual"),
    "final_logit_softcapping": _to("final_logit_softcapping", float),
    "attention.scale": _to("attention_multiplier", float),
    "embedding_scale": _to("embedding_multiplier", float),
    "residual_scale": _to("residual_multiplier", float),
    "logit_scale": _to("logits_scaling", float),
    "attention.sliding_window": _to("sliding_window", lambda value: value or None),
    "rope.freq_base_swa": _to("rope_local_base_freq", float),
    "block_count": _to("num_hidden_layers"),
    "nextn_predict_layers": _to("mtp_num_hidden_layers"),
    "ssm.inner_size": _put_inner_size,
}


def put_layer_types(row: Architecture, config: dict[str, Any], given: Mapping[str, Value]) -> None:
    """What each block has in place of attention over all of the text, where blocks differ."""
    if not any(key.setting == "layer_types" for key in row.keys):
        return
    if "ssm.state_size" in {key.name for key in row.keys}:
        _put_linear_attention(config, given)
        return
    period = {"gemma2": 2, "gemma3": 6}[row.name]
    pattern = given.get("attention.sliding_window_pattern")
    if pattern is not None and pattern.kind == Kind.ARRAY:
        windows = [bool(value) for value in pattern.value]
    else:
        every = max(1, pattern.value) if pattern is not None else period
        windows = [(i + 1) % every != 0 for i in range(config["num_hidden_layers"])]
    config["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]


def _put_linear_attention(config: dict[str, Any], given: Mapping[str, Value]) -> None:
    every = given.get("full_attention_interval")
    config["full_attention_interval"] = 4 if every is None else every.value
    linear = given.get("attention.recurrent_layers")
    if linear is not None:
        own = linear.value[: config["num_hidden_layers"]]
        kinds = ["linear_attention" if one else "full_attention" for one in own]
        config["layer_types"] = kinds


def _put_rope(
    row: Architecture,
    config: dict[str, Any],
    given: Mapping[str, Value],
    vectors: Mapping[str, NDArray[np.float32]],
    source: GgufSource,
) -> None:
    """rope_theta and rope_scaling, spelled so that every transformers since 4.43 reads them."""
    theta = float(plain(given["rope.freq_base"])) if "rope.freq_base" in given else 10000.0
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = given.get("rope.dimension_count")
    share = "rotary_pct" if row.name == "gptneox" else "partial_rotary_factor"
    whole = any(k.name == "rope.dimension_count" and k.setting == "head_dim" for k in row.keys)
    if rotated is not None and whole:
        if rotated.value != width:
            config["head_dim"] = width = rotated.value
    elif rotated is not None:
        if not 0 < rotated.value <= width or rotated.value % 2:
            raise FormatError(
                f"{source.path}: {row.name}.rope.dimension_count is {rotated.value}, expected an "
                f"even number of the {width} elements of a head"
            )
        config[share] = rotated.value / width
    config["rotary_emb_base" if row.name == "gptneox" else "rope_theta"] = theta
    scaling: dict[str, Any] = {}
    kind = given.get("rope.scaling.type")
    if {*vectors} not in _ROPE_TENSORS:
        raise FormatError(
            f"{source.path}: has {', '.join(vectors)}; expected rope_freqs.weight by itself, or "
            "rope_factors_long.weight and rope_factors_short.weight"
        )
    for name, divisors in vectors.items():
        if not ((divisors > 0) & (divisors < _MOST_SLOWED)).all():
            raise FormatError(
                f"{source.path}: {name} holds {divisors.min()} to {divisors.max()}, expected "
                f"numbers above 0 and below {_MOST_SLOWED:.0e}"
            )
    if not 0 < theta < math.inf:
        raise FormatError(f"{source.path}: {row.name}.rope.freq_base is {theta}")
    if "rope_freqs.weight" in vectors:
        scaling = _llama3(vectors["rope_freqs.weight"], theta, width, source)
    elif "rope_factors_long.weight" in vectors:
        scaling = {"rope_type": "longrope"}
        for name in ("long", "short"):
            factors = vectors[f"rope_factors_{name}.weight"]
            scaling[f"{name}_factor"] = [float(str(value)) for value in factors]
    elif kind is not None and kind.value != "none":
        scaling = {"rope_type": kind.value}
        for key, name in _SCALING_KEYS.items():
            if f"rope.scaling.{key}" in given:
                value = plain(given[f"rope.scaling.{key}"])
                scaling[name] = (
                    value if name == "original_max_position_embeddings" else float(value)
                )
    sections = given.get("rope.dimension_sections")
    if sections is not None:
        own = {"mrope_section": [int(one) for one in sections.value[:3]], "mrope_interleaved": True}
        scaling = {"rope_type": "default", **scaling, **own}
    if row.name == "phi3":
        original = given.get("rope.scaling.original_context_length")
        if original is not None:
            config["original_max_position_embeddings"] = original.value
    if scaling:
        config["rope_scaling"] = scaling


_ROPE_TENSORS: tuple[set[str], ...] = (
    set(), {"rope_freqs.weight"}, {"rope_factors_long.weight", "rope_factors_short.weight"},
)  # fmt: skip
_SCALING_KEYS = {
    "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "yarn_ext_factor": "extrapolation_factor", "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip


def _llama3(
    divisors: NDArray[np.float32], theta: float, rotated: int, source: GgufSource
) -> dict[str, Any]:
    """The settings of Llama 3 that give these divisors; they are looked for among powers of two."""
    if len(divisors) != rotated // 2:
        raise FormatError(
            f"{source.path}: rope_freqs.weight holds {len(divisors)} numbers, and heads are "
            f"{rotated} wide; expected half as many"
        )
    for length in _LLAMA3_LENGTHS:
        for low in (1.0, 2.0):
            for high in (4.0, 2.0, 8.0):
                rope = {
                    "rope_type": "llama3",
                    "factor": float(divisors.max()),
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }
                if low >= high:
                    continue
                with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                    made = llama3_divisors({**rope, "rope_theta": theta}, rotated)
                if np.array_equal(made, divisors):
                    return rope
    raise UnsupportedError(
        f"{source.path}: rope_freqs.weight holds no divisors that the llama3 rope settings of "
        "config.json give, so that a checkpoint cannot be told of them"
    )


def _put_asked(row: Architecture, config: dict[str, Any], names: Collection[str]) -> None:
    """Settings that say whether a model has some modules."""
    asked = {module.name: module.asked for module in row.modules if module.asked}
    for (name, block), gguf_name in gguf_names(row, config).items() if asked else ():
        if name in asked and block == 0:
            config[asked[name]] = f"{gguf_name}.weight" in names


def _put_own(row: Architecture, config: dict[str, Any], names: Collection[str]) -> None:
    """Settings that llama.cpp takes for granted, or sees in the tensors."""
    if row.name == "stablelm":
        config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in names
    if row.name in ("qwen3moe", "qwen3next"):
        config["norm_topk_prob"] = True
    if row.name in ("gemma2", "gemma3"):
        large = {"gemma2": 46, "gemma3": 62}[row.name] == config["num_hidden_layers"]
        by_width = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = by_width if large else config["head_dim"]


def _prove(row: Architecture, config: Mapping[str, Any], source: GgufSource) -> None:
    """Ask the table for the keys of this config.json, and compare."""
    completed = complete(config, row.defaults)
    for key in row.keys:
        name = f"{row.name}.{key.name}"
        there, again = source.metadata.get(name), key.value(completed)
        if there is None:
            continue
        # As decimals, since other converters write integers of other widths.
        if again is not None and plain(there) == plain(again):
            continue
        raise UnsupportedError(
            f"{source.path}: {name} is {there.value!r}, and no setting of "
            f"{config['architectures'][0]} says that"
        )
