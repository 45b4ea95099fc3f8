"""The newest decoders as GGUF: settings under the names that released checkpoints have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import QtoolError, SourceError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.to_hf.config import has_way_back
from qtool.gguf.to_hf.model import hf_model
from qtool.planning.whole import check_whole
from qtool.verification.gguf.tensors import check_tensors
from support.gguf import gguf_models
from support.gguf.families import newest
from support.gguf.gguf_to_hf import keys_of, source_of, without_tokenizers

__all__ = ["without_tokenizers"]

_WINDOW = {"rope_type": "default", "rope_theta": 2e3}
REFUSED: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "mimo-v2": (
        ({"swa_head_dim": 16}, "swa_head_dim is 16, and it takes 32"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
        ({"rope_parameters": {"sliding_attention": {**_WINDOW, "partial_rotary_factor": 0.5}}},
         "another share of a head"),
    ),
    "qwen4-exp": (
        ({"output_gate_type": "silu"}, "output_gate_type is silu"),
        ({"ple_layer_ids": [1, 2]}, "2 blocks with n-grams, and it takes one"),
        ({"seed": 5}, "layer_multipliers holds other numbers"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
    ),
    "laguna": (
        ({"moe_router_logit_softcapping": 5.0}, "softcapping is 5.0"),
        ({"gating_types": ["per_element"] * 4}, "gating_types says of some blocks"),
        ({"gating": "none"}, "gating is none"),
        ({"layer_types": ["sliding_attention", *["full_attention"] * 3]}, "rotates 24 elements"),
    ),
    "kimi-linear": (
        ({"linear_attn_config": {"num_heads": 2}}, "2 delta nets in a block, and it takes 4"),
        ({"q_lora_rank": 8}, "q_lora_rank is 8"),
    ),
    "hy-v4": (
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0"),
        ({"indexer_types": ["shared", "full", "full"]}, "the first block is shared"),
    ),
    "dots3-note": (
        ({"swa_q_lora_rank": 24}, "q_lora_rank is 32 and 24 in blocks"),
        ({"moe_shared_expert_intermediate_size": 64}, "shared experts are 64 wide"),
        ({"use_dsa": False}, "use_dsa is false"),
    ),
    "glm-5.3": (
        ({"hc_mult": 2}, "hc_mult is 2, and it takes 4"),
        ({"index_kpool": 1}, "index_kpool is 1"),
        ({"indexer_types": ["full", "shared", "full"]}, "the first indexer is shared"),
    ),
    "step-3.7": (
        ({"partial_rotary_factors": [1.0] * 4}, "full_attention rotates 1.0 of a head"),
        ({"query_pre_attn_scalar": 16}, "query_pre_attn_scalar is 16"),
    ),
    "minimax-m3": (
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, and it takes 7.0"),
        ({"rotary_dim": 32}, "rotary_dim is 32, and the class rotates 16 of 32"),
        ({"layer_types": ["full_attention"] * 3}, "an indexer is not in all blocks with experts"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_compute_otherwise(name: str, tmp_path: Path) -> None:
    folder = gguf_models.build(name, tmp_path / "model")
    given = (folder / "config.json").read_text()
    for settings, said in REFUSED[name]:
        gguf_models.rewrite_config(
            folder,
            lambda config: config.get("text_config", config).update(settings),  # noqa: B023
        )
        with pytest.raises(UnsupportedError, match=said):
            source_of(folder)
        (folder / "config.json").write_text(given)


def test_mimo_v2_as_released(tmp_path: Path) -> None:
    """Without what the class of transformers calls the same; a window counts the token itself."""
    folder = gguf_models.build("mimo-v2", tmp_path / "model")
    first = keys_of(source_of(folder))

    def change(config: dict[str, object]) -> None:
        rope = config.pop("rope_parameters")
        assert isinstance(rope, dict)
        config |= {
            "rope_theta": rope["full_attention"]["rope_theta"],
            "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
            "moe_layer_freq": [int(k == "sparse") for k in config.pop("mlp_layer_types")],
            "sliding_window_size": 7,
            "sliding_window": 7,
        }
        del config["layer_types"], config["rms_norm_eps"]

    gguf_models.rewrite_config(folder, change)
    assert keys_of(source_of(folder)) == first


@pytest.mark.parametrize("name", newest.MODELS)
def test_tensors_are_those_that_the_metadata_say(name: str, tmp_path: Path) -> None:
    folder = gguf_models.build(name, tmp_path / "model")
    assert check_whole(Checkpoint.open(folder)) == []
    source = source_of(folder)
    assert list(check_tensors(source)) == []
    if not has_way_back(source.architecture):
        return  # sizes are not told
    taller = [
        replace(t, shape=(t.shape[0] + 1, *t.shape[1:])) if t.name.endswith("attn_output.weight")
        else t for t in source.tensors
    ]  # fmt: skip
    found = list(check_tensors(replace(source, tensors=tuple(taller))))
    assert len(found) == sum(t is not s for t, s in zip(taller, source.tensors, strict=True))
    lost = tuple(t for t in source.tensors if not t.name.endswith("attn_output.weight"))
    (found_lost,) = check_tensors(replace(source, tensors=lost))
    assert "that" in found_lost.message and "missing" in found_lost.message


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mimo-v2", "attention.head_count_kv", None),
        ("qwen4-exp", "rope.dimension_sections", array(Kind.FLOAT32, [float("nan")] * 4)),
        ("hy-v4", "attention.indexer.types", u32(3)),
        ("dots3-note", "expert_feed_forward_length", None),
        ("dots3-note", "attention.sliding_window_pattern", array(Kind.INT32, [0])),
        ("dots3-note", "attention.key_length_mla_swa", None),
        ("minimax-m3", "expert_feed_forward_length", None),
    ],
)
def test_keys_that_lie(name: str, key: str, value: Value | None, tmp_path: Path) -> None:
    source = source_of(gguf_models.build(name, tmp_path / "model"))
    key = f"{source.architecture}.{key}"
    metadata = {k: v for k, v in source.metadata.items() if k != key}
    changed = replace(source, metadata=metadata if value is None else {**metadata, key: value})
    with pytest.raises(QtoolError):
        hf_model(changed)
    list(check_tensors(changed))  # looks at what it can


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("step-3.7", "moe_router_activation", "softmax"),
        ("kimi-linear", "moe_router_activation_func", "softmax"),
        ("glm-5.3", "scoring_func", "softmax"),
        ("glm-5.3", "swiglu_limit", 0.0),
        ("laguna", "moe_apply_router_weight_on_input", True),
        ("ling-2", "score_function", "softplus"),
    ],
)
def test_what_is_taken_for_granted(name: str, key: str, value: object, tmp_path: Path) -> None:
    folder = gguf_models.build(name, tmp_path / name)

    def change(config: dict[str, Any]) -> None:
        inside = config.get("text_config", config)
        inside[key] = value

    gguf_models.rewrite_config(folder, change)
    with pytest.raises(UnsupportedError, match=key):
        hf_source(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("name", "key"),
    [("glm4", "num_nextn_predict_layers"), ("qwen4-exp", "mtp_num_hidden_layers")],
)
def test_blocks_that_are_counted_and_not_there(name: str, key: str, tmp_path: Path) -> None:
    """llama.cpp would ask for them."""
    folder = gguf_models.build(name, tmp_path / name)
    before = hf_source(Checkpoint.open(folder)).metadata
    gguf_models.rewrite_config(folder, lambda config: config.update({key: 1}))
    after = hf_source(Checkpoint.open(folder)).metadata
    assert {k: v for k, v in after.items() if k != "general.name"} == {
        k: v for k, v in before.items() if k != "general.name"
    }


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("step-3.7", "moe_layers_enum", "x"),
        ("step-3.7", "moe_layers_enum", [1, "x"]),
        ("step-3.7", "attention_other_setting", [1]),
        ("qwen4-exp", "ple_layer_ids", 3),
        ("qwen4-exp", "ple_layer_ids", ["a"]),
        ("qwen4-exp", "eos_token_id", []),
        ("bamba", "attn_layer_indices", "x"),
        ("smallthinker", "rope_layout", 1),
        ("minicpm", "dim_model_base", 0),
    ],
)
def test_settings_of_other_kinds(name: str, key: str, value: object, tmp_path: Path) -> None:
    folder = gguf_models.build(name, tmp_path / name)

    def change(config: dict[str, Any]) -> None:
        inside = config.get("text_config", config)
        inside.pop("mlp_layer_types", None)
        inside[key] = value

    gguf_models.rewrite_config(folder, change)
    with pytest.raises(SourceError, match=key):
        hf_source(Checkpoint.open(folder))
