"""GGUF files that lack keys, biases or parts of experts, or have those of older converters."""

from dataclasses import replace
from pathlib import Path

import pytest

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Value, f32, u32
from qtool.gguf.to_hf.model import hf_model
from support.gguf import gguf_models
from support.gguf.gguf_to_hf import source_of, without_tokenizers

__all__ = ["without_tokenizers"]


@pytest.mark.parametrize(
    ("name", "lost", "expected"),
    [
        ("deepseek-v3-plain", ("expert_group_count", "expert_group_used_count"),
         {"n_group": 1, "topk_group": 1}),
        ("deepseek-v3-plain", ("expert_weights_scale",), {"routed_scaling_factor": 1.0}),
        ("deepseek-v3", ("leading_dense_block_count",), {"first_k_dense_replace": 0}),
        ("glm-5", ("expert_weights_norm",), {"norm_topk_prob": False}),
        ("granite-moe", ("attention.scale",), {"attention_multiplier": 0.25}),
    ],
)  # fmt: skip
def test_what_a_file_leaves_to_llama_cpp(
    name: str, lost: tuple[str, ...], expected: dict[str, object], tmp_path: Path
) -> None:
    """Not what a class of transformers takes for granted."""
    source = source_of(gguf_models.build(name, tmp_path / "model"))
    less = {key: value for key, value in source.metadata.items() if not key.endswith(lost)}
    assert len(less) < len(source.metadata)
    if "leading_dense_block_count" in lost:  # then the first has experts, which this one lacks
        with pytest.raises(FormatError, match=r"lacks blk\.0\.ffn_gate_exps\.weight"):
            hf_model(replace(source, metadata=less))
        return
    config = hf_model(replace(source, metadata=less)).config
    assert {key: config[key] for key in expected} == expected
    if "attention.scale" in lost:
        return
    # As where they are zero.
    zero = {key: Value(value.kind, type(value.value)(0)) for key, value in source.metadata.items()
            if key.endswith(lost)}  # fmt: skip
    config = hf_model(replace(source, metadata={**source.metadata, **zero})).config
    assert {key: config[key] for key in expected} == expected


def test_the_function_of_scores_has_to_be_said(tmp_path: Path) -> None:
    """llama.cpp takes softmax where DeepSeek V3's class has a sigmoid."""
    source = source_of(gguf_models.build("deepseek-v3", tmp_path / "model"))
    less = {k: v for k, v in source.metadata.items() if not k.endswith("expert_gating_func")}
    with pytest.raises(UnsupportedError, match=r"lacks deepseek2\.expert_gating_func"):
        hf_model(replace(source, metadata=less))


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("glm-5", "attention.indexer.types", u32(1), "expected"),
        ("deepseek-v3", "expert_group_count", u32(4), "divides the 6 experts"),
        ("deepseek-v3", "expert_group_used_count", u32(4), "expected 1 to 3"),
        ("deepseek-v3", "expert_used_count", u32(7), "expected 1 to 6"),
        ("llama4", "expert_used_count", u32(0), "expected 1 to 6"),
        ("gpt-oss", "rope.scaling.factor", f32(-1), "expected a number above 0"),
        ("qwen3-next", "ssm.group_count", u32((1 << 31) - 1), "the longest axis of a tensor"),
        ("qwen3-next", "ssm.state_size", u32(130), "room for"),
    ],
)
def test_counts_of_experts_and_states(
    name: str, key: str, value: Value, said: str, tmp_path: Path
) -> None:
    source = source_of(gguf_models.build(name, tmp_path / "model"))
    named = f"{source.architecture}.{key}"
    assert named in source.metadata
    with pytest.raises(FormatError, match=said):
        hf_model(replace(source, metadata={**source.metadata, named: value}))


@pytest.mark.parametrize(
    ("name", "tensor", "older"),
    [
        ("deepseek-v2", "blk.0.attn_k_b.weight", "blk.0.attn_kv_b.weight"),
        ("qwen3-next", "blk.0.attn_gate.weight", "blk.0.ssm_in.weight"),
    ],
)
def test_files_of_older_converters(name: str, tensor: str, older: str, tmp_path: Path) -> None:
    source = source_of(gguf_models.build(name, tmp_path / "model"))
    tensors = tuple(replace(t, name=older) if t.name == tensor else t for t in source.tensors)
    with pytest.raises(UnsupportedError, match=f"{older} is of an older llama.cpp converter"):
        hf_model(replace(source, tensors=tensors))


@pytest.mark.parametrize("end", ["ffn_down_exps", "ffn_gate_exps"])
def test_biases_of_experts_are_needed(end: str, tmp_path: Path) -> None:
    source = source_of(gguf_models.build("gpt-oss", tmp_path / "model"))
    lost = f"blk.1.{end}.bias"
    tensors = tuple(t for t in source.tensors if t.name != lost)
    with pytest.raises(FormatError, match=f"lacks {lost}"):
        hf_model(replace(source, tensors=tensors))
