"""Checkpoints as sources of GGUF: names, rows, what is dropped."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.formats.gguf_values import Kind
from qtool.gguf.from_hf import hf_rows, row_maps
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.source import GgufSource
from support.gguf.gguf_from_hf import without_tokenizers
from support.models.hf_arrays import (
    GEMMA,
    LLAMA,
    MIXTRAL,
    NEOX,
    gemma,
    llama,
    mixtral,
    neox,
    numbers,
    values,
    write,
)

__all__ = ["without_tokenizers"]


def test_llama(tmp_path: Path) -> None:
    """Names in the checkpoint's order, q and k rearranged, vectors in float32."""
    tensors = llama()
    tensors["model.layers.1.self_attn.q_proj.bias"] = numbers(16, seed=90)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = numbers(2)
    source = hf_source(write(tmp_path / "some", LLAMA, tensors))
    assert [t.name for t in source.tensors[:5]] == [
        "token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight",
        "blk.0.attn_v.weight",
    ]  # fmt: skip
    # Halves of a head become pairs: this is convert_hf_to_gguf.py's permutation.
    for name, theirs, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        weight = tensors[f"model.layers.1.self_attn.{theirs}.weight"]
        paired = weight.reshape(heads, 2, 2, 16).swapaxes(1, 2).reshape(weight.shape)
        assert np.array_equal(values(source, f"blk.1.{name}.weight"), paired)
    bias = tensors["model.layers.1.self_attn.q_proj.bias"]
    paired = bias.astype(np.float32).reshape(4, 2, 2).swapaxes(1, 2).reshape(16)
    assert np.array_equal(values(source, "blk.1.attn_q.bias"), paired)
    norm = tensors["model.layers.1.post_attention_layernorm.weight"].astype(np.float32)
    assert np.array_equal(values(source, "blk.1.ffn_norm.weight"), norm)
    assert np.array_equal(values(source, "output.weight"), tensors["lm_head.weight"])
    assert source.dropped == (
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "llama.cpp computes it itself"),
    )
    assert {k: (v.kind, v.value) for k, v in source.metadata.items()} == {
        "general.architecture": (Kind.STRING, "llama"),
        "general.type": (Kind.STRING, "model"),
        "general.name": (Kind.STRING, "Some"),
        "general.size_label": (Kind.STRING, "4.3K"),
        "llama.block_count": (Kind.UINT32, 2),
        "llama.context_length": (Kind.UINT32, 64),
        "llama.embedding_length": (Kind.UINT32, 16),
        "llama.feed_forward_length": (Kind.UINT32, 24),
        "llama.attention.head_count": (Kind.UINT32, 4),
        "llama.attention.head_count_kv": (Kind.UINT32, 2),
        "llama.rope.freq_base": (Kind.FLOAT32, 10000.0),
        "llama.attention.layer_norm_rms_epsilon": (Kind.FLOAT32, float(np.float32(1e-6))),
        "llama.attention.key_length": (Kind.UINT32, 4),
        "llama.attention.value_length": (Kind.UINT32, 4),
        "llama.vocab_size": (Kind.UINT32, 10),
        "llama.rope.dimension_count": (Kind.UINT32, 4),
        "general.quantization_version": (Kind.UINT32, 2),
    }


def test_experts_stacked_or_fused_are_the_same(tmp_path: Path) -> None:
    one = hf_source(write(tmp_path / "a", MIXTRAL, mixtral(fused=False)))
    two = hf_source(write(tmp_path / "b", MIXTRAL, mixtral(fused=True)))
    assert {t.name for t in one.tensors} == {t.name for t in two.tensors}
    for tensor in one.tensors:
        assert np.array_equal(values(one, tensor.name), values(two, tensor.name)), tensor.name
    assert np.array_equal(values(one, "blk.1.ffn_up_exps.weight"), numbers(3, 24, 16, seed=61))
    router = next(t for t in one.tensors if t.name == "blk.0.ffn_gate_inp.weight")
    assert router.type.name == "F32"
    assert one.metadata["llama.expert_count"].value == 3


def test_experts_in_several_files(tmp_path: Path) -> None:
    tensors = mixtral(fused=False)
    whole = hf_source(write(tmp_path / "whole", MIXTRAL, tensors))
    names = list(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        write(tmp_path / "parts", MIXTRAL, {name: tensors[name] for name in part})
        file = tmp_path / "parts" / f"model-{number}.safetensors"
        (tmp_path / "parts" / "model.safetensors").rename(file)
        index |= dict.fromkeys(part, file.name)
    path = tmp_path / "parts" / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    source = hf_source(Checkpoint.open(tmp_path / "parts"))
    assert {t.name for t in source.tensors} == {t.name for t in whole.tensors}
    for tensor in whole.tensors:
        assert np.array_equal(values(source, tensor.name), values(whole, tensor.name)), tensor.name


def test_neox_queries_keys_values(tmp_path: Path) -> None:
    tensors = neox()
    source = hf_source(write(tmp_path / "neox", NEOX, tensors))
    given = tensors["gpt_neox.layers.1.attention.query_key_value.weight"].reshape(4, 3, 4, 16)
    expected = given.transpose(1, 0, 2, 3).reshape(48, 16)
    assert np.array_equal(values(source, "blk.1.attn_qkv.weight"), expected)
    assert [name for name, _ in source.dropped] == ["gpt_neox.layers.0.attention.bias"]


def _sources(root: Path) -> list[GgufSource]:
    return [
        hf_source(write(root / "llama", LLAMA, llama("float32"))),
        hf_source(write(root / "mixtral", MIXTRAL, mixtral(fused=False))),
        hf_source(write(root / "fused", MIXTRAL, mixtral(fused=True))),
        hf_source(write(root / "neox", NEOX, neox())),
    ]


def test_ranges_of_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    for source in _sources(tmp_path):
        for tensor in source.tensors:
            whole = tensor.read(0, tensor.rows)
            assert whole.nbytes == tensor.nbytes
            assert len(tensor.read(tensor.rows, tensor.rows)) == 0
            for _ in range(8):
                first, last = sorted(random.integers(0, tensor.rows + 1, 2))
                part = tensor.read(int(first), int(last))
                assert np.array_equal(part, whole[first:last]), tensor.name


def test_reading_from_many_threads(tmp_path: Path) -> None:
    for source in _sources(tmp_path):
        tasks = [t for t in source.tensors for _ in range(4)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda t: t.read(0, t.rows), tasks))
        for tensor, raw in zip(tasks, found, strict=True):
            assert np.array_equal(raw, tensor.read(0, tensor.rows))


def test_each_tensor_of_the_checkpoint_is_used_once_or_dropped(tmp_path: Path) -> None:
    for folder, source in zip(("llama", "mixtral", "neox"), _sources(tmp_path)[::2], strict=False):
        names = [name for tensor in source.tensors for name in tensor.origin]
        names += [name for name, _ in source.dropped]
        if folder != "mixtral":
            assert sorted(names) == sorted(set(names))
        assert set(names) == set(Checkpoint.open(source.path).tensors)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gemma_multiplies_by_one_plus_the_norm(dtype: str, tmp_path: Path) -> None:
    source = hf_source(write(tmp_path / "gemma", GEMMA, gemma(dtype)))
    given = gemma(dtype)["model.layers.1.input_layernorm.weight"]
    expected = (given + given.dtype.type(1)).astype(np.float32)
    assert np.array_equal(values(source, "blk.1.attn_norm.weight"), expected)
    assert not any(t.name == "output.weight" for t in source.tensors)


def test_bfloat16_stays_and_its_norms_are_widened(tmp_path: Path) -> None:
    halves = {
        name: (weight.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for name, weight in gemma("float32").items()
    }
    source = hf_source(write(tmp_path / "gemma", GEMMA, halves))
    assert np.array_equal(values(source, "token_embd.weight"), halves["model.embed_tokens.weight"])
    norm = (halves["model.norm.weight"].astype(np.uint32) << 16).view(np.float32) + np.float32(1)
    assert np.array_equal(values(source, "output_norm.weight"), norm)


def test_parts_that_see_images_are_dropped(tmp_path: Path) -> None:
    """The settings and tensors of a language model inside another; vision is named and left out."""
    inner = {k: v for k, v in LLAMA.items() if k != "architectures"}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**inner, "head_dim": 4, "sliding_window": 8, "query_pre_attn_scalar": 4},
    }
    tensors = {}
    for name, weight in gemma("float16").items():
        tensors["language_model." + name] = weight
    for b in range(2):
        block = f"language_model.model.layers.{b}."
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"{block}{norm}.weight"] = numbers(16)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{block}self_attn.{norm}.weight"] = numbers(4)
    tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"] = numbers(4, 4)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = numbers(4)
    source = hf_source(write(tmp_path / "sees", config, tensors))
    assert [name for name, _ in source.dropped] == list(tensors)[-2:]
    assert "vision or audio" in source.dropped[0][1]
    assert "its convert_hf_to_gguf.py --mmproj makes" in source.dropped[0][1]
    assert source.metadata["gemma3.rope.freq_base_swa"].value == 10000.0
    assert source.metadata["gemma3.attention.sliding_window"].value == 8


def _head(source: GgufSource) -> NDArray[Any] | None:
    names = [tensor.name for tensor in source.tensors]
    return values(source, "output.weight") if "output.weight" in names else None


def test_heads_that_are_the_embedding(tmp_path: Path) -> None:
    """Dropped where llama.cpp takes the embedding by itself, written twice where it does not."""
    tensors = llama()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source = hf_source(write(tmp_path / "tied", {**LLAMA, "tie_word_embeddings": True}, tensors))
    reason = "the head is the embedding, which is stored once"
    assert source.dropped == (("lm_head.weight", reason),) and _head(source) is None
    gemma_too = gemma("float16") | {"lm_head.weight": tensors["lm_head.weight"]}
    gemma_too["model.embed_tokens.weight"] = tensors["lm_head.weight"]
    source = hf_source(write(tmp_path / "gemma", GEMMA, gemma_too))
    assert source.dropped == (("lm_head.weight", reason),)
    without = {name: t for name, t in neox().items() if name != "embed_out.weight"}
    source = hf_source(write(tmp_path / "neox", {**NEOX, "tie_word_embeddings": True}, without))
    # llama.cpp does not load this architecture without a head of its own.
    assert np.array_equal(values(source, "output.weight"), values(source, "token_embd.weight"))


@pytest.mark.parametrize("changed", ["first", "last", "dtype"])
def test_heads_that_differ_are_kept_though_said_to_be_tied(changed: str, tmp_path: Path) -> None:
    """As transformers does: config.json is wrong there."""
    tensors = llama()
    head = tensors["model.embed_tokens.weight"].copy()
    if changed == "dtype":
        head = head.astype(np.float32)
    else:
        head.flat[0 if changed == "first" else -1] += 1
    tensors["lm_head.weight"] = head
    source = hf_source(write(tmp_path / "tied", {**LLAMA, "tie_word_embeddings": True}, tensors))
    assert source.dropped == () and np.array_equal(_head(source), head)
    checkpoint = write(tmp_path / "neox", {**NEOX, "tie_word_embeddings": True}, neox())
    assert np.array_equal(_head(hf_source(checkpoint)), neox()["embed_out.weight"])
    gemma_too = gemma("float16") | {"lm_head.weight": head}
    checkpoint = write(tmp_path / "gemma", {**GEMMA, "tie_word_embeddings": True}, gemma_too)
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight differs from the embedding"):
        hf_source(checkpoint)


def test_heads_are_compared_beyond_the_first_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_rows, "_PIECE", 100)
    test_heads_that_differ_are_kept_though_said_to_be_tied("last", tmp_path)
    test_heads_that_are_the_embedding(tmp_path)


@pytest.mark.parametrize(
    ("rows", "total", "groups"),
    [(row_maps.QUERY_PAIRS, 48, 6), (row_maps.QUERY_PAIRS, 10, 1), (row_maps.QKV_BY_KIND, 60, 4)],
)
def test_row_maps_undo_each_other(rows: row_maps.RowMap, total: int, groups: int) -> None:
    every = np.arange(total)
    there = rows.forward(every, groups, total)
    assert sorted(there) == every.tolist()
    assert np.array_equal(rows.inverse(there, groups, total), every)


def test_halves_of_fused_experts() -> None:
    every = np.arange(30)
    first = row_maps.FIRST_HALF.forward(every, 3, 30)
    second = row_maps.SECOND_HALF.forward(every, 3, 30)
    assert sorted([*first, *second]) == list(range(60))
    assert np.array_equal(row_maps.FIRST_HALF.inverse(first, 3, 30), every)
    assert np.array_equal(row_maps.SECOND_HALF.inverse(second, 3, 30), every)


def test_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from qtool.checkpoints.checkpoint import Checkpoint\n"
        "from qtool.gguf.from_hf.source import hf_source\n"
        "source = hf_source(Checkpoint.open('qtool/tiny'))\n"
        "assert source.tensors[0].read(0, 1).size\n"
        "print(sorted({'torch', 'transformers', 'pydantic'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr[-2000:]
