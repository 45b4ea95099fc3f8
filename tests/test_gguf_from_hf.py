"""Checkpoints as sources of GGUF: names, rows, keys, what is dropped and what is refused."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, SourceError, UnsupportedError
from qtool.formats.gguf_values import Kind
from qtool.gguf import from_hf, row_maps
from qtool.gguf.architectures import TABLE
from qtool.gguf.from_hf import hf_source
from qtool.gguf.general import general_metadata
from qtool.gguf.hf_config import complete
from qtool.gguf.rope_tensors import llama3_divisors
from qtool.gguf.source import GgufSource

Arrays = dict[str, NDArray[Any]]
_DTYPES = {"float16": "F16", "uint16": "BF16", "float32": "F32", "uint8": "U8"}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 10, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_: {})


def write(folder: Path, config: dict[str, Any], tensors: Arrays) -> Checkpoint:
    """model.safetensors and config.json; uint16 stands for bfloat16."""
    folder.mkdir(exist_ok=True)
    header: dict[str, Any] = {}
    at = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": _DTYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(folder)


def numbers(*shape: int, seed: int = 0, dtype: str = "float16") -> NDArray[Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def llama(dtype: str = "float16", *, mlp: bool = True, heads: int = 4, kv: int = 2) -> Arrays:
    found = {"model.embed_tokens.weight": (10, 16), "model.norm.weight": (16,)}
    for b in range(2):
        block = f"model.layers.{b}."
        found |= {
            f"{block}self_attn.q_proj.weight": (heads * 4, 16),
            f"{block}self_attn.k_proj.weight": (kv * 4, 16),
            f"{block}self_attn.v_proj.weight": (kv * 4, 16),
            f"{block}self_attn.o_proj.weight": (16, heads * 4),
            f"{block}input_layernorm.weight": (16,),
            f"{block}post_attention_layernorm.weight": (16,),
        }
        if mlp:
            found |= {
                f"{block}mlp.gate_proj.weight": (24, 16),
                f"{block}mlp.up_proj.weight": (24, 16),
                f"{block}mlp.down_proj.weight": (16, 24),
            }
    found["lm_head.weight"] = (10, 16)
    return {
        name: numbers(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(found.items())
    }


def values(source: GgufSource, name: str) -> NDArray[Any]:
    tensor = next(t for t in source.tensors if t.name == name)
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.type.name]
    return tensor.read(0, tensor.rows).view(dtype).reshape(tensor.shape)


def test_llama(tmp_path: Path) -> None:
    """Names in the checkpoint's order, q and k rearranged, vectors in float32."""
    tensors = llama()
    tensors["model.layers.1.self_attn.q_proj.bias"] = numbers(16, seed=90)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = numbers(2)
    source = hf_source(write(tmp_path / "some", _LLAMA, tensors))
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


def mixtral(*, fused: bool) -> Arrays:
    """Three experts a block, in six tensors or in two."""
    tensors = llama(mlp=False)
    for b in range(2):
        block = f"model.layers.{b}."
        gate, up = numbers(3, 24, 16, seed=50 + b), numbers(3, 24, 16, seed=60 + b)
        down = numbers(3, 16, 24, seed=70 + b)
        router = numbers(3, 16, seed=80 + b)
        if fused:
            tensors[f"{block}mlp.gate.weight"] = router
            tensors[f"{block}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            tensors[f"{block}mlp.experts.down_proj"] = down
            continue
        tensors[f"{block}block_sparse_moe.gate.weight"] = router
        for i in range(3):
            for name, weight in (("w1", gate), ("w2", down), ("w3", up)):
                tensors[f"{block}block_sparse_moe.experts.{i}.{name}.weight"] = weight[i]
    return tensors


_MIXTRAL = {**_LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 3}


def test_experts_stacked_or_fused_are_the_same(tmp_path: Path) -> None:
    one = hf_source(write(tmp_path / "a", _MIXTRAL, mixtral(fused=False)))
    two = hf_source(write(tmp_path / "b", _MIXTRAL, mixtral(fused=True)))
    assert {t.name for t in one.tensors} == {t.name for t in two.tensors}
    for tensor in one.tensors:
        assert np.array_equal(values(one, tensor.name), values(two, tensor.name)), tensor.name
    assert np.array_equal(values(one, "blk.1.ffn_up_exps.weight"), numbers(3, 24, 16, seed=61))
    router = next(t for t in one.tensors if t.name == "blk.0.ffn_gate_inp.weight")
    assert router.type.name == "F32"
    assert one.metadata["llama.expert_count"].value == 3


def test_experts_in_several_files(tmp_path: Path) -> None:
    tensors = mixtral(fused=False)
    whole = hf_source(write(tmp_path / "whole", _MIXTRAL, tensors))
    names = list(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        write(tmp_path / "parts", _MIXTRAL, {name: tensors[name] for name in part})
        file = tmp_path / "parts" / f"model-{number}.safetensors"
        (tmp_path / "parts" / "model.safetensors").rename(file)
        index |= dict.fromkeys(part, file.name)
    path = tmp_path / "parts" / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    source = hf_source(Checkpoint.open(tmp_path / "parts"))
    assert {t.name for t in source.tensors} == {t.name for t in whole.tensors}
    for tensor in whole.tensors:
        assert np.array_equal(values(source, tensor.name), values(whole, tensor.name)), tensor.name


def neox() -> Arrays:
    shapes: dict[str, tuple[int, ...]] = {
        "gpt_neox.embed_in.weight": (10, 16), "gpt_neox.final_layer_norm.weight": (16,),
        "gpt_neox.final_layer_norm.bias": (16,), "embed_out.weight": (10, 16),
    }  # fmt: skip
    for b in range(2):
        for name, shape in {
            "attention.query_key_value": (48, 16), "attention.dense": (16, 16),
            "mlp.dense_h_to_4h": (24, 16), "mlp.dense_4h_to_h": (16, 24),
            "input_layernorm": (16,), "post_attention_layernorm": (16,),
        }.items():  # fmt: skip
            shapes[f"gpt_neox.layers.{b}.{name}.weight"] = shape
            shapes[f"gpt_neox.layers.{b}.{name}.bias"] = shape[:1]
    made = {name: numbers(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return made | {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), np.uint8)}


_NEOX = {**_LLAMA, "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu"}


def test_neox_queries_keys_values(tmp_path: Path) -> None:
    tensors = neox()
    source = hf_source(write(tmp_path / "neox", _NEOX, tensors))
    given = tensors["gpt_neox.layers.1.attention.query_key_value.weight"].reshape(4, 3, 4, 16)
    expected = given.transpose(1, 0, 2, 3).reshape(48, 16)
    assert np.array_equal(values(source, "blk.1.attn_qkv.weight"), expected)
    assert [name for name, _ in source.dropped] == ["gpt_neox.layers.0.attention.bias"]


def _sources(root: Path) -> list[GgufSource]:
    return [
        hf_source(write(root / "llama", _LLAMA, llama("float32"))),
        hf_source(write(root / "mixtral", _MIXTRAL, mixtral(fused=False))),
        hf_source(write(root / "fused", _MIXTRAL, mixtral(fused=True))),
        hf_source(write(root / "neox", _NEOX, neox())),
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


def gemma(dtype: str) -> Arrays:
    made = llama(dtype)
    del made["lm_head.weight"]
    return made


def gemma2(dtype: str) -> Arrays:
    made = gemma(dtype)
    for b in range(2):
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            made[f"model.layers.{b}.{norm}.weight"] = numbers(16, dtype=dtype)
    return made


_GEMMA = {**_LLAMA, "architectures": ["GemmaForCausalLM"], "head_dim": 4, "hidden_act": "gelu"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gemma_multiplies_by_one_plus_the_norm(dtype: str, tmp_path: Path) -> None:
    source = hf_source(write(tmp_path / "gemma", _GEMMA, gemma(dtype)))
    given = gemma(dtype)["model.layers.1.input_layernorm.weight"]
    expected = (given + given.dtype.type(1)).astype(np.float32)
    assert np.array_equal(values(source, "blk.1.attn_norm.weight"), expected)
    assert not any(t.name == "output.weight" for t in source.tensors)


def test_bfloat16_stays_and_its_norms_are_widened(tmp_path: Path) -> None:
    halves = {
        name: (weight.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for name, weight in gemma("float32").items()
    }
    source = hf_source(write(tmp_path / "gemma", _GEMMA, halves))
    assert np.array_equal(values(source, "token_embd.weight"), halves["model.embed_tokens.weight"])
    norm = (halves["model.norm.weight"].astype(np.uint32) << 16).view(np.float32) + np.float32(1)
    assert np.array_equal(values(source, "output_norm.weight"), norm)


def test_parts_that_see_images_are_dropped(tmp_path: Path) -> None:
    """The settings and tensors of a language model inside another; vision is named and left out."""
    inner = {k: v for k, v in _LLAMA.items() if k != "architectures"}
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
    assert "sees images" in source.dropped[0][1]
    assert source.metadata["gemma3.rope.freq_base_swa"].value == 10000.0
    assert source.metadata["gemma3.attention.sliding_window"].value == 8


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({}, None),
        ({"sliding_window_pattern": 6}, None),
        ({"sliding_window_pattern": 2}, [True, False, True]),
        ({"sliding_window_pattern": 1}, [False] * 3),
        ({"layer_types": ["sliding_attention"] * 3}, None),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
         [True, False, False]),
    ],
)  # fmt: skip
def test_which_blocks_look_through_a_window(
    settings: dict[str, Any], windows: list[bool] | None
) -> None:
    """Said to llama.cpp where it is not all but each sixth of Gemma 3."""
    row = TABLE["Gemma3ForCausalLM"]
    config = complete({"num_hidden_layers": 3, **settings}, row.defaults)
    said = {key.name: key.value(config) for key in row.keys if "sliding_window" in key.name}
    window, pattern = said["attention.sliding_window"], said["attention.sliding_window_pattern"]
    assert (pattern.value if pattern else None) == windows
    assert (window is None) is (windows == [False] * 3)


def test_tied_heads(tmp_path: Path) -> None:
    tied = {**_LLAMA, "tie_word_embeddings": True}
    source = hf_source(write(tmp_path / "tied", tied, llama()))
    assert source.dropped == (
        ("lm_head.weight", "the head is the embedding, which is stored once"),
    )
    without = {name: t for name, t in neox().items() if name != "embed_out.weight"}
    source = hf_source(write(tmp_path / "neox", {**_NEOX, "tie_word_embeddings": True}, without))
    # llama.cpp does not load this architecture without a head of its own.
    assert np.array_equal(values(source, "output.weight"), values(source, "token_embd.weight"))


def _without(name: str) -> Arrays:
    return {key: value for key, value in llama().items() if key != name}


def _with(**more: NDArray[Any]) -> Arrays:
    return llama() | {name.replace("__", "."): value for name, value in more.items()}


_REFUSED: list[tuple[dict[str, Any], Arrays, type[QtoolError], str]] = [
    ({"architectures": ["RwkvForCausalLM"]}, llama(), UnsupportedError,
     r"RwkvForCausalLM, which is not in the table .*LlamaForCausalLM.*architectures\.py"),
    ({"architectures": []}, llama(), UnsupportedError, "names no architecture"),
    ({"quantization_config": {"quant_method": "awq"}}, llama(), UnsupportedError, "is quantized"),
    ({"hidden_act": "relu"}, llama(), UnsupportedError, "activation is 'relu'.*computes silu"),
    ({"rope_scaling": {"type": "longrope"}}, llama(), UnsupportedError, "of the type 'longrope'"),
    ({"num_hidden_layers": 3}, llama(), FormatError, r"lacks model\.layers\.2\.self_attn\.q_proj"),
    ({"num_hidden_layers": 1}, llama(), FormatError, r"no place .*'model\.layers\.1\.self_attn"),
    ({"num_hidden_layers": 1 << 30}, llama(), SourceError, "1073741824 blocks.* only 21 tensors"),
    ({"num_hidden_layers": "two"}, llama(), SourceError, "num_hidden_layers is 'two'"),
    ({"hidden_size": None}, llama(), SourceError, "hidden_size is 'None'"),
    ({"rms_norm_eps": "small"}, llama(), SourceError, "rms_norm_eps is 'small', expected a number"),
    ({"rope_parameters": [1]}, llama(), SourceError, r"rope_parameters is \[1\]"),
    ({"rope_theta": 1e300}, llama(), SourceError, r"rope_theta is '1e\+300', expected a number"),
    ({"rope_scaling": {"rope_type": "llama3", "high_freq_factor": 1}}, llama(), SourceError,
     "makes no sense"),
    ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"], "head_dim": 4,
      "hidden_act": "gelu"}, gemma2("float16"), SourceError, "layer_types is not a list of 2"),
    ({"num_attention_heads": 3}, llama(), FormatError, r"q_proj.*\[16, 16\].* 3 \(num_attention"),
    ({"vocab_size": 11}, llama(), SourceError, "embedding has 10 rows.* vocab_size 11"),
    ({}, _without("lm_head.weight"), FormatError, r"lacks lm_head\.weight"),
    ({}, _without("model.layers.1.input_layernorm.weight"), FormatError,
     r"lacks model\.layers\.1\.input_layernorm\.weight"),
    ({}, _with(model__layers__0__sinks=numbers(4)), FormatError, r"'model\.layers\.0\.sinks'"),
    ({}, _with(language_model__lm_head__weight=numbers(10, 16)), FormatError, "are lm_head.weight"),
    ({}, llama() | {"model.norm.weight": np.ones(16, np.uint8)}, UnsupportedError,
     r"model\.norm\.weight is U8"),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}, mixtral(fused=False),
     FormatError, r"lacks model\.layers\.0\.block_sparse_moe\.experts\.3\.w1"),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}, mixtral(fused=True),
     FormatError, r"gate_up_proj has the shape \[3, 48, 16\].*4 \(num_experts\)"),
    ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]}, llama(),
     UnsupportedError, "some blocks have no experts.*norm_topk_prob is False"),
    ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 99, "head_dim": 4,
      "hidden_act": "gelu"}, llama(), UnsupportedError, "query_pre_attn_scalar is 99"),
    ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1]}, llama(),
     UnsupportedError, "no_rope_layers is not each fourth"),
    ({"architectures": ["Qwen2ForCausalLM"], "head_dim": 8}, llama(), UnsupportedError,
     "head_dim is 8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "tensors", "error", "message"), _REFUSED)
def test_refused(
    change: dict[str, Any], tensors: Arrays, error: type[QtoolError], message: str, tmp_path: Path
) -> None:
    checkpoint = write(tmp_path / "model", {**_LLAMA, **change}, tensors)
    with pytest.raises(error, match=message):
        hf_source(checkpoint)


def test_warnings(tmp_path: Path) -> None:
    config = {**_LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 32}
    (warning,) = hf_source(write(tmp_path / "model", config, llama())).warnings
    assert warning.startswith("attention looks back 32 tokens")


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


def test_llama3_divisors() -> None:
    """1 for high frequencies, the factor for low ones, and a formula in between."""
    rope = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    found = llama3_divisors(rope, 128)
    frequencies = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    share = np.clip((8192 * frequencies / (2 * np.pi) - 1) / 3, 0, 1)
    assert found.dtype == np.float32
    assert np.allclose(found, 1 / ((1 - share) / 8 + share), rtol=1e-5)
    assert found[:28].tolist() == [1.0] * 28
    assert found[-20:].tolist() == [8.0] * 20
    # Those of Llama 3.2 1B as torch computes them, to the bit.
    small = llama3_divisors({**rope, "factor": 32.0}, 64)
    between = [1.6513292789459229, 3.2922627925872803, 9.666730880737305]
    assert small.tolist() == [1.0] * 15 + between + [32.0] * 14


def test_spellings_of_rope_settings() -> None:
    """The same settings in the ways that transformers 4 and 5 write them."""
    now = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    then = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}
    defaults = TABLE["Qwen3ForCausalLM"].defaults
    one = complete(now, defaults)["rope_parameters"]["full_attention"]
    two = complete(then, defaults)["rope_parameters"]["full_attention"]
    assert {k: two[k] for k in one} == one
    old = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_local_base_freq": 5e3}
    rope = complete(old, TABLE["Gemma3ForCausalLM"].defaults)["rope_parameters"]
    assert (rope["full_attention"]["rope_theta"], rope["full_attention"]["factor"]) == (1e6, 8.0)
    assert rope["sliding_attention"] == {"rope_theta": 5e3, "rope_type": "default"}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_defaults_are_those_of_transformers(name: str) -> None:
    import transformers

    kinds = {"Gemma3ForCausalLM": "Gemma3Text", "Gemma3ForConditionalGeneration": "Gemma3Text"}
    kind = kinds.get(name, name.removesuffix("ForCausalLM"))
    theirs = getattr(transformers, f"{kind}Config")().to_dict()
    needed = {"hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"}
    ours = complete({key: theirs[key] for key in needed}, TABLE[name].defaults)
    old = {"num_experts": "num_local_experts"}
    for key in TABLE[name].defaults:
        if not key.startswith("rope_"):
            theirs_too = theirs[key] if key in theirs else theirs[old[key]]
            assert ours[key] == theirs_too, key
    rope = theirs["rope_parameters"]
    full = ours["rope_parameters"]["full_attention"]
    for key, value in rope.get("full_attention", rope).items():
        assert full[key] == value, key
    assert ours["rope_parameters"].get("sliding_attention") == rope.get("sliding_attention")


def test_general_metadata(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\nlanguage:\n- en\n- no\nbase_model: them/Base-1B\ntags: {a: [1]}\n---\n"
    )
    settings = {"temperature": 0.6, "top_k": 20, "top_p": "much", "min_p": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    found = {key: value.value for key, value in general_metadata(tmp_path, []).items()}
    assert found["general.license"] == "mit"
    assert found["general.languages"] == ["en", "no"]
    assert found["general.base_model.0.repo_url"] == "https://huggingface.co/them/Base-1B"
    assert (found["general.sampling.temp"], found["general.sampling.top_k"]) == (0.6, 20)
    assert not any("top_p" in key or "min_p" in key for key in found)


@pytest.mark.parametrize(
    "card", ["---\n{]\n---\n", "---\n- a\n---\n", "no front matter", "---\nlicense: [", "\xff"]
)
def test_model_cards_that_say_nothing(card: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card, encoding="latin-1")
    (tmp_path / "generation_config.json").write_text("[]")
    assert set(general_metadata(tmp_path, [])) == {
        *("general.type", "general.name", "general.size_label"),
        *({"general.basename", "general.version", "general.finetune"} & _heuristics(tmp_path)),
    }


def _heuristics(folder: Path) -> set[str]:
    (folder / "README.md").unlink()
    return set(general_metadata(folder, []))


def test_name_in_a_download_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--them--Thing-1B-Instruct" / "snapshots" / ("0a" * 20)
    folder.mkdir(parents=True)
    found = general_metadata(folder, [])
    assert found["general.name"].value == "Thing 1B Instruct"
    assert found["general.finetune"].value == "Instruct"


def test_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from qtool.checkpoint import Checkpoint\n"
        "from qtool.gguf.from_hf import hf_source\n"
        "source = hf_source(Checkpoint.open('qtool/tiny'))\n"
        "assert source.tensors[0].read(0, 1).size\n"
        "print(sorted({'torch', 'transformers', 'pydantic'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr[-2000:]
