"""Checkpoints with experts as sources of GGUF: which blocks have what, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats.gguf_values import u32
from qtool.gguf.from_hf.source import hf_source
from support.gguf import gguf_models
from support.gguf.families import sparse
from support.gguf.gguf_from_hf import without_tokenizers
from support.models import small_tokenizers as small
from support.models.hf_arrays import LLAMA, Arrays, llama, numbers, write
from support.models.small_tokenizers import SIZE, keys_of

__all__ = ["without_tokenizers"]

T = "tokenizer.ggml."
ROUTED: dict[str, Any] = {
    **LLAMA, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 3, "head_dim": 4,
    "moe_intermediate_size": 8, "num_hidden_layers": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip


def glm(*, ahead: bool) -> Arrays:
    """A block without experts, one with three, and one that predicts ahead."""
    tensors = llama()
    for name in [name for name in tensors if name.startswith("model.layers.1.mlp")]:
        del tensors[name]
    for block in (1, 2) if ahead else (1,):
        at = f"model.layers.{block}."
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            if ".mlp." not in name:
                tensors[name.replace("layers.0.", f"layers.{block}.")] = tensors[name]
        tensors[f"{at}mlp.gate.weight"] = numbers(3, 16)
        tensors[f"{at}mlp.gate.e_score_correction_bias"] = numbers(3)
        for expert in ("experts.0", "experts.1", "experts.2", "shared_experts"):
            for part, shape in (("gate", (8, 16)), ("up", (8, 16)), ("down", (16, 8))):
                tensors[f"{at}mlp.{expert}.{part}_proj.weight"] = numbers(*shape)
    if ahead:
        tensors["model.layers.2.eh_proj.weight"] = numbers(16, 32)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.2.{norm}.weight"] = numbers(16)
    return tensors


def test_blocks_differ(tmp_path: Path) -> None:
    source = hf_source(write(tmp_path / "glm", ROUTED, glm(ahead=True)))
    names = {tensor.name: tensor for tensor in source.tensors}
    assert "blk.0.ffn_up.weight" in names and "blk.0.ffn_up_exps.weight" not in names
    assert "blk.1.ffn_up.weight" not in names
    for block in (1, 2):
        assert names[f"blk.{block}.ffn_up_exps.weight"].shape == (3, 8, 16)
        assert names[f"blk.{block}.exp_probs_b.bias"].type.name == "F32"
    assert names["blk.2.nextn.eh_proj.weight"].shape == (16, 32)
    assert source.metadata["glm4moe.block_count"] == u32(3)
    assert source.metadata["glm4moe.nextn_predict_layers"] == u32(1)
    assert source.metadata["glm4moe.rope.dimension_count"] == u32(2)


def test_what_predicts_ahead_may_be_left_out(tmp_path: Path) -> None:
    """As transformers leaves it; llama.cpp goes without it, too. But not half of it."""
    source = hf_source(write(tmp_path / "glm", ROUTED, glm(ahead=False)))
    assert not any(tensor.name.startswith("blk.2.") for tensor in source.tensors)
    assert source.metadata["glm4moe.block_count"] == u32(3)
    half = glm(ahead=True)
    del half["model.layers.2.eh_proj.weight"]
    with pytest.raises(FormatError, match=r"lacks model\.layers\.2\.eh_proj\.weight"):
        hf_source(write(tmp_path / "half", ROUTED, half))


_GLM, _DOTS, _OLMOE = ("Glm4MoeForCausalLM", "Dots1ForCausalLM", "OlmoeForCausalLM")
_REFUSED: list[tuple[str, dict[str, Any], type[QtoolError], str]] = [
    (_GLM, {"use_qk_norm": True}, FormatError, r"lacks model\.layers\.0\.self_attn\.q_norm"),
    (_GLM, {"first_k_dense_replace": 2}, FormatError, r"lacks model\.layers\.1\.mlp\.gate_proj"),
    (_GLM, {"n_routed_experts": 2}, FormatError, r"gate\.weight .*\[3, 16\].*be \[2, 16\]"),
    (_DOTS, {}, UnsupportedError, "there are 2 heads of keys, and it takes as many as heads"),
    (_DOTS, {"attention_bias": True}, UnsupportedError, "it has no bias behind the attention"),
    (_OLMOE, {"clip_qkv": 8.0}, UnsupportedError, "clip_qkv is 8.0, and it clips nothing"),
    (_OLMOE, {"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob is true"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), _REFUSED)
def test_refused(
    name: str, change: dict[str, Any], error: type[QtoolError], message: str, tmp_path: Path
) -> None:
    config = {**ROUTED, "architectures": [name], **change}
    with pytest.raises(error, match=message):
        hf_source(write(tmp_path / "model", config, glm(ahead=False)))


@pytest.mark.parametrize(
    "change", [{"moe_layer_interval": 2}, {"moe_layer_end_index": 0}, {"use_bias": True}]
)
def test_ernie_with_experts_in_each_block(change: dict[str, Any], tmp_path: Path) -> None:
    config = {**ROUTED, "architectures": ["Ernie4_5_MoeForCausalLM"], **change}
    with pytest.raises(UnsupportedError, match=f"{next(iter(change))} is .*, and it "):
        hf_source(write(tmp_path / "model", config, glm(ahead=False)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_scale": 0.2}, "attn_scale is 0.2, and it takes 0.1"),
        ({"attention_chunk_size": 64}, "attention_chunk_size is 64"),
        ({"use_qk_norm": False}, "with 6 experts it takes the other"),
        ({"moe_layers": [0, 2]}, "moe_layers is not each block"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types is not chunked_attention"),
        ({"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers is not each fourth"),
        ({"attention_bias": True}, "attention_bias is true"),
    ],
)
def test_llama4_as_it_was_released(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = gguf_models.build("llama4", tmp_path / "model")
    gguf_models.rewrite_config(folder, lambda config: config.update(change))
    with pytest.raises(UnsupportedError, match=message):
        hf_source(Checkpoint.open(folder))


def test_fused_experts_as_released_or_as_in_memory(tmp_path: Path) -> None:
    """Qwen3-VL with experts was released with each transposed; transformers reads both."""
    folder = gguf_models.build("qwen3-vl-moe", tmp_path / "model")
    found = []
    for _ in range(2):
        source = hf_source(Checkpoint.open(folder))
        found.append({t.name: t.read(0, t.rows).tobytes() for t in source.tensors})
        sparse.turn_experts(folder)
    assert found[0] == found[1] and "blk.1.ffn_down_exps.weight" in found[0]
    gguf_models.rewrite_config(folder, lambda c: c["text_config"].update(mlp_only_layers=[0]))
    with pytest.raises(UnsupportedError, match="some blocks have no experts"):
        hf_source(Checkpoint.open(folder))


def test_what_predicts_ahead_in_ernie_is_dropped(tmp_path: Path) -> None:
    folder = gguf_models.build("ernie4.5-moe", tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["model.mtp_linear_proj.0.weight"] = numbers(4, 4)
    save_file(state, folder / "model.safetensors")
    ((name, reason),) = hf_source(Checkpoint.open(folder)).dropped
    assert name == "model.mtp_linear_proj.0.weight" and "multi-token prediction" in reason


_NO_OUTPUT_BIAS = (
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM", "Olmo2ForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("name", _NO_OUTPUT_BIAS)
def test_a_bias_behind_the_attention(name: str, tmp_path: Path) -> None:
    """llama.cpp does not load a file that has one."""
    config = {**LLAMA, "architectures": [name], "attention_bias": True}
    with pytest.raises(UnsupportedError, match="it has no bias behind the attention"):
        hf_source(write(tmp_path / "model", config, llama()))


def test_tokens_that_glm_names_nowhere(tmp_path: Path) -> None:
    names = ("<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>")
    extra = [small.added(SIZE + number, text) for number, text in enumerate(names)]
    files = {
        "tokenizer.json": small.bpe(extra=extra),
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }
    keys = keys_of(tmp_path, files, "glm4moe", SIZE + 4)
    ids = {"eos": SIZE, "bos": SIZE + 1, "eot": SIZE + 2, "unknown": SIZE, "eom": SIZE + 3}
    assert {n: keys[f"{T}{n}_token_id"] for n in ids} == {n: u32(i) for n, i in ids.items()}
    assert f"{T}bos_token_id" not in keys_of(tmp_path, files, "dots1", SIZE + 4)
