"""config.json told by the metadata of a GGUF file: the inverse of the table's keys.

The table says how each key follows from config.json. Here the settings are put back, and then the
table is asked for the keys once more: what does not come out as the file has it is an error, so
that nothing is lost between the two.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind
from qtool.gguf.architectures import TABLE, Architecture
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.biases import bias_settings
from qtool.gguf.to_hf.blocks import WITH_STATES, put_layer_types, put_state_spaces
from qtool.gguf.to_hf.classes import MODEL_TYPES, class_of
from qtool.gguf.to_hf.gemma4 import put_blocks, put_rotations
from qtool.gguf.to_hf.keys import (
    NONE_AT_ZERO,
    OF_SIGHT,
    WHOLE,
    checked_keys,
    most,
    one_for_all,
    plain,
)
from qtool.gguf.to_hf.latent import attends_to_latents, put_latents, put_whole_latents
from qtool.gguf.to_hf.own import put_asked, put_own
from qtool.gguf.to_hf.rope import put_rope

_TOKEN_IDS = {
    "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}  # fmt: skip
_REMOTE = {row.name for row in TABLE.values() if row.remote}
_REMOTE -= {row.name for row in TABLE.values() if not row.remote}
_BESIDE = "this is the text beside a vision tower, without which transformers has no class for it"
_NO_CLASS = "transformers has no class for the decoder alone"
# Why a file cannot be made a checkpoint again, by architecture.
_NO_WAY_BACK = {
    "apertus": "of the architecture apertus a checkpoint keeps what activations learned in "
    "tensors, and the file in keys, which cannot be turned back yet",
    **dict.fromkeys(("glm5-next", "step35"), _BESIDE),
    **dict.fromkeys(("chameleon", "muse-glimmer"), _NO_CLASS),
    **{name: f"transformers has no class for the architecture {name}" for name in _REMOTE},
}  # fmt: skip

# Tensors that converters wrote once; llama.cpp loads them to this day.
_OLDER = {"deepseek2": ".attn_kv_b.weight", "qwen3next": ".ssm_in.weight"}


def has_way_back(architecture: str) -> bool:
    """Whether a file of llama.cpp's architecture can be made a checkpoint again, and run here."""
    return architecture not in _NO_WAY_BACK


def check_way_back(source: GgufSource) -> None:
    """UnsupportedError where a file cannot be made a checkpoint again."""
    name = source.architecture
    if not has_way_back(name):
        raise UnsupportedError(
            f"{source.path}: {_NO_WAY_BACK[name]}, so that the file is neither run nor converted "
            "here; use the checkpoint that it was made of, and llama-perplexity to measure the file"
        )
    for tensor in source.tensors:
        if name in _OLDER and tensor.name.endswith(_OLDER[name]):
            raise UnsupportedError(
                f"{source.path}: {tensor.name} is of an older llama.cpp converter, and two tensors "
                "today; convert the checkpoint once more"
            )


def hf_config(
    source: GgufSource, vectors: Mapping[str, NDArray[np.float32]], dtype: str
) -> dict[str, Any]:
    """config.json; `vectors` are the tensors that hold rotation factors, by GGUF name.

    FormatError where the keys make no sense, UnsupportedError where transformers cannot be told
    what the file asks for.
    """
    check_way_back(source)
    named = class_of(source)
    row = TABLE[named]
    rows = {tensor.name: tensor.rows for tensor in source.tensors}
    if "token_embd.weight" not in rows:
        raise FormatError(f"{source.path}: lacks token_embd.weight, which every model has")
    given = checked_keys(source, row)
    alone = (row.alone or named).partition(" ")[0]
    config: dict[str, Any] = {
        "architectures": [alone],
        "model_type": MODEL_TYPES.get(alone, row.name),
        "torch_dtype": dtype,
        "vocab_size": rows["token_embd.weight"],
        "tie_word_embeddings": row.drops_head or "output.weight" not in rows,
    }
    if "num_key_value_heads" in row.defaults:  # where llama.cpp has another default
        config["num_key_value_heads"] = most(given["attention.head_count"].value)
    heads = most(given["attention.head_count"].value)
    if heads and isinstance(row.defaults.get("head_dim"), int):
        config["head_dim"] = given["embedding_length"].value // heads
    known = {key.name: key for key in row.keys}
    for key in row.keys:
        if key.make is None and key.name in given:
            value = plain(given[key.name])  # of an integer, if another writer's
            config[key.setting] = float(value) if key.real else value
    for name, value in given.items():
        if name in _SETTINGS and known[name].make is not None:
            _SETTINGS[name](config, plain(value))
    if row.mtp:
        if (ahead := given.get("nextn_predict_layers")) is not None:
            config[row.mtp] = ahead.value
        config["num_hidden_layers"] = given["block_count"].value - config.get(row.mtp, 0)
    if attends_to_latents(row):
        put_latents(row, named, config, given, source)
    if row.name == "minicpm3":
        put_whole_latents(config, given)
    put_layer_types(row, config, given)
    if row.name in WITH_STATES:
        put_state_spaces(config, given, rows.keys())
    if row.name == "gemma4":
        put_blocks(config, given, rows.keys(), source)
        put_rotations(config, given, vectors, source)
    elif any(key.name == "rope.freq_base" for key in row.keys):
        put_rope(row, config, given, vectors, source)
    config |= bias_settings(row, rows.keys(), source)
    put_own(row, config, rows.keys(), source)
    put_asked(row, config, rows.keys())
    ids = token_ids(source, config["vocab_size"])
    config |= {name: one for name, one in ids.items() if one is not None or name not in config}
    _prove(row, config, source)
    _check_scores(named, source)
    return config


def _check_scores(named: str, source: GgufSource) -> None:
    """UnsupportedError where a file of DeepSeek's kind leaves out what makes weights of the
    router's scores, and llama.cpp takes another function than the class."""
    said = "deepseek2.expert_gating_func" in source.metadata
    if said or named not in ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"):
        return
    blocks = source.metadata["deepseek2.block_count"].value
    vocabulary = next(t.rows for t in source.tensors if t.name == "token_embd.weight")
    if blocks in (47, 48) and vocabulary == 154880:  # GLM-4.7 Flash, as llama.cpp knows it
        return
    raise UnsupportedError(
        f"{source.path}: lacks deepseek2.expert_gating_func, for which llama.cpp takes softmax, "
        f"and {named} has a sigmoid; convert the checkpoint once more"
    )


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


def _to(setting: str, change: Callable[[Any], Any] = lambda value: value) -> Callable[..., None]:
    def put(config: dict[str, Any], value: Any) -> None:
        config[setting] = change(value)

    return put


def _put_inner_size(config: dict[str, Any], value: Any) -> None:
    if "linear_num_value_heads" not in config:
        return
    config["linear_value_head_dim"] = value // max(1, config.get("linear_num_value_heads", 1))


def _in_attention(setting: str) -> Callable[[dict[str, Any], Any], None]:
    """Of MPT, which says how it attends in an object of its own."""

    def put(config: dict[str, Any], value: Any) -> None:
        whole = setting == "alibi_bias_max" and float(value).is_integer()
        config.setdefault("attn_config", {})[setting] = int(value) if whole else float(value)

    return put


# Keys of the table that are made of a setting in their own way, and how to get that back.
_SETTINGS: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "use_parallel_residual": _to("use_parallel_residual"),
    "final_logit_softcapping": _to("final_logit_softcapping", lambda value: float(value) or None),
    "attention.scale": _to("attention_multiplier", float),
    "embedding_scale": _to("embedding_multiplier", float),
    "residual_scale": _to("residual_multiplier", float),
    "logit_scale": _to("logits_scaling", float),
    "attention.sliding_window": _to("sliding_window", lambda value: value or None),
    "rope.freq_base_swa": _to("rope_local_base_freq", float),
    "block_count": _to("num_hidden_layers"),
    "ssm.inner_size": _put_inner_size,
    "attention.head_count": _to("num_attention_heads", most),
    "attention.head_count_kv": _to("num_key_value_heads", most),
    "feed_forward_length": _to("intermediate_size", most),
    "attention.max_alibi_bias": _in_attention("alibi_bias_max"),
    "attention.clamp_kqv": _in_attention("clip_qkv"),
    "embedding_length_per_layer_input": _to("hidden_size_per_layer_input"),
    "activation_sparsity_scale": _to(
        "activation_sparsity_pattern", lambda value: [0.95 if one > 0 else 0.0 for one in value]
    ),
    "attention.compress_ratios": _to("indexer_compress_ratio", most),
    "swiglu_clamp_exp": _to("swiglu_limit", most),
    "swiglu_clamp_shexp": _to("swiglu_limit", most),
    "expert_group_count": _to("n_group"),
    "expert_group_used_count": _to("topk_group"),
    "expert_used_count": _to("moe_topk"),
    "expert_feed_forward_length": _to("moe_intermediate_size"),
    "expert_shared_count": _to("num_shared_expert"),
    "expert_shared_feed_forward_length": _to("shared_intermediate_size"),
    "expert_weights_norm": _to("norm_topk_prob"),
}


def _prove(row: Architecture, config: Mapping[str, Any], source: GgufSource) -> None:
    """Ask the table for the keys of this config.json, and compare."""
    completed = row.completed(config)
    keys = [key for key in row.keys if not (row.alone and key.name in OF_SIGHT)]
    said = {key.name: value for key in keys if (value := key.value(completed)) is not None}
    for key in keys:
        name = f"{row.name}.{key.name}"
        there, again = source.metadata.get(name), said.get(key.name)
        if there is None or (key.name in NONE_AT_ZERO and there.value == 0):
            continue
        if again is None and there.value is False:
            continue
        there = one_for_all(there) if again is not None and again.kind != Kind.ARRAY else there
        # As decimals, since other converters write integers of other widths.
        if again is not None and plain(there) == plain(again):
            continue
        raise UnsupportedError(
            f"{source.path}: {name} is {there.value!r}, and no setting of "
            f"{config['architectures'][0]} says that"
        )
