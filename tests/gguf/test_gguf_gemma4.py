"""Gemma 4 as GGUF and back: blocks of two kinds, what is shared, what llama.cpp cannot compute."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.from_hf import source as from_hf
from qtool.gguf.from_hf.rope_tensors import proportional_divisors
from qtool.gguf.from_hf.source import NOTHING_READS, hf_source
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf.to_hf.hf_tensor import floats_of
from qtool.gguf.to_hf.model import hf_model
from qtool.gguf_types import F32
from support.gguf import gguf_models
from support.models import small_tokenizers as small
from support.runs import quantizing

FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tokenizers, which the small models have not."""
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})


def source_of(folder: Path, **changes: Any) -> GgufSource:
    gguf_models.rewrite_config(folder, lambda config: config.update(changes))
    return hf_source(Checkpoint.open(folder))


def keys_of(source: GgufSource) -> dict[str, Any]:
    found = {k: v for k, v in source.metadata.items() if k.startswith("gemma4.")}
    return {
        k.removeprefix("gemma4."): [*v.value] if v.kind is Kind.ARRAY else v.value
        for k, v in found.items()
    }


def shapes_of(source: GgufSource) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in source.tensors}


def divisors(source: GgufSource) -> list[float]:
    assert source.tensors[0].name == "rope_freqs.weight"
    return [float(x) for x in floats_of(source.tensors[0], 0, 1).reshape(-1)]


@pytest.mark.usefixtures("plain")
def test_blocks_of_two_kinds(tmp_path: Path) -> None:
    source = source_of(gguf_models.build("gemma4-e2b", tmp_path / "model"))
    shapes, keys = shapes_of(source), keys_of(source)
    heads = {"attention.key_length": 32, "attention.key_length_swa": 16}
    inputs = {"embedding_length_per_layer_input": 8, "attention.shared_kv_layers": 3}
    assert (heads | inputs).items() <= keys.items()
    assert keys["feed_forward_length"] == [96] * 3 + [192] * 3
    assert keys["attention.sliding_window_pattern"] == [True, True, False] * 2
    assert shapes["per_layer_token_embd.weight"] == (96, 48)
    for b in range(6):
        head = 32 if b in (2, 5) else 16
        assert shapes[f"blk.{b}.attn_q.weight"] == (4 * head, 64)
        assert shapes[f"blk.{b}.layer_output_scale.weight"] == (1,)
        for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            assert (f"blk.{b}.{name}" in shapes) is (b < 3)
    assert divisors(source) == [1.0] * 4 + [float(np.float32(1e30))] * 12


@pytest.mark.usefixtures("plain")
def test_experts_beside_the_mlp(tmp_path: Path) -> None:
    source = source_of(gguf_models.build("gemma4-26b-a4b", tmp_path / "model", dtype="bfloat16"))
    shapes, keys = shapes_of(source), keys_of(source)
    assert shapes["blk.1.ffn_gate_up_exps.weight"] == (6, 64, 64)
    assert shapes["blk.1.ffn_gate_inp.scale"] == (64,) and shapes["blk.1.ffn_up.weight"] == (96, 64)
    assert shapes["blk.1.ffn_down_exps.scale"] == (6,)
    assert keys["attention.head_count_kv"] == [2, 2, 1, 1] and keys["expert_used_count"] == 2
    assert {t.type.name for t in source.tensors if "_inp" in t.name or ".scale" in t.name} == {
        "F32"
    }
    assert ("blk.1.attn_v.weight" in shapes) and ("blk.2.attn_v.weight" not in shapes)


@pytest.mark.usefixtures("plain")
def test_settings_as_released(tmp_path: Path) -> None:
    """Released checkpoints name what transformers writes block by block."""
    folder = gguf_models.build("gemma4-31b", tmp_path / "model")
    saved = source_of(folder)

    def as_released(config: dict[str, Any]) -> None:
        del config["per_layer_config"]
        config |= {"global_head_dim": 32, "num_global_key_value_heads": 1}

    gguf_models.rewrite_config(folder, as_released)
    released = source_of(folder)
    assert released.metadata == saved.metadata and shapes_of(released) == shapes_of(saved)


@pytest.mark.usefixtures("plain")
def test_rotations(tmp_path: Path) -> None:
    folder = gguf_models.build("gemma4", tmp_path / "model")
    local = {"rope_type": "default", "rope_theta": 1e4}
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    source = source_of(folder, rope_parameters={FULL: {**full, "factor": 4.0}, WINDOW: local})
    assert divisors(source) == [4.0] * 8 + [float(np.float32(1e30))] * 8
    again = hf_model(source).config["rope_parameters"]
    assert again == {FULL: {**full, "factor": 4.0}, WINDOW: local}
    whole = {"rope_type": "default", "rope_theta": 1e6}
    source = source_of(folder, rope_parameters={FULL: whole, WINDOW: local})
    assert divisors(source) == [1.0] * 16
    made = hf_model(source).config["rope_parameters"][FULL]
    assert made == {**full, "partial_rotary_factor": 1.0}


def test_shares_of_a_head() -> None:
    """As transformers rounds them; each comes back from its divisors."""
    for width in (48, 80, 256):
        for rotated in range(width // 2 + 1):
            share = (2 * rotated + 0.5) / width if rotated < width // 2 else 1.0
            found = proportional_divisors({"partial_rotary_factor": share}, width)
            assert int((found == 1).sum()) == int(share * width // 2) == rotated


@pytest.mark.usefixtures("plain")
def test_keys_and_values_that_nothing_reads(tmp_path: Path) -> None:
    """Released E2B has them in the blocks that share, as have files made by others."""
    folder = gguf_models.build("gemma4-e2b", tmp_path / "model")
    before = source_of(folder)
    state = load_file(folder / "model.safetensors")
    extra = {
        f"model.layers.4.self_attn.{name}.weight": state[f"model.layers.1.self_attn.{name}.weight"]
        for name in ("k_proj", "v_proj", "k_norm")
    }
    save_file({**state, **extra}, folder / "model.safetensors", {"format": "pt"})
    source = source_of(folder)
    assert shapes_of(source) == shapes_of(before)
    assert set(source.dropped) == {(name, NOTHING_READS) for name in extra}
    key = next(t for t in source.tensors if t.name == "blk.1.attn_k.weight")
    theirs = replace(source, tensors=(*source.tensors, replace(key, name="blk.4.attn_k.weight")))
    made = hf_model(theirs)
    assert ("blk.4.attn_k.weight", NOTHING_READS) in made.dropped
    assert not any(".layers.4.self_attn.k_proj" in s.name for t in made.tensors for s in t.specs)
    beyond = replace(source, tensors=(*source.tensors, replace(key, name="blk.4.attn_odd.weight")))
    with pytest.raises(FormatError, match=r"no module .* 'blk\.4\.attn_odd\.weight'"):
        hf_model(beyond)


_BY_BLOCK = {"2": {"head_dim": 32}, "3": {"head_dim": 32}}
_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma4", {"attention_bias": True}, "attention_bias is true, and it adds no such biases"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "is all, and it looks back only"),
    ("gemma4", {"layer_types": [FULL] * 4}, "no block looks through a window"),
    ("gemma4", {"layer_types": ["chunked_attention", WINDOW, FULL, FULL]}, "names chunked_atten"),
    ("gemma4", {"per_layer_config": {**_BY_BLOCK, "2": {"head_dim": 64}}}, "head_dim is 64 in bl"),
    ("gemma4", {"per_layer_config": {**_BY_BLOCK, "0": {"head_dim": 8}}}, "head_dim is .* block"),
    ("gemma4", {"per_layer_config": {"0": {"rms_norm_eps": 1}}}, "changes rms_norm_eps, and it"),
    ("gemma4-e2b", {"layer_types": [WINDOW, FULL, WINDOW] * 2}, "last 3 blocks share keys and val"),
    ("gemma4-e2b", {"num_kv_shared_layers": 4}, "last 4 blocks share keys and values"),
    ("gemma4-e2b", {"vocab_size_per_layer_input": 64}, r"is 64, and it has as many .*\(96\)"),
    ("gemma4", {"hidden_activation": "silu"}, "the activation is 'silu'"),
    ("gemma4", {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}}, "type 'yarn'"),
    ("gemma4", {"rope_parameters": {FULL: {}, WINDOW: {"rope_type": "linear", "factor": 2.0}}},
     "blocks with windows rotate with scaling of the type linear"),
]  # fmt: skip


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("name", "changes", "message"), _REFUSED)
def test_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = gguf_models.build(name, tmp_path / "model")
    with pytest.raises(UnsupportedError, match=message):
        source_of(folder, **changes)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        ({"layer_types": [FULL]}, "layer_types is not a list of 4 names"),
        ({"per_layer_config": {"2": {"head_dim": "x"}, "3": {"head_dim": "x"}}}, 'head_dim is "x"'),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
         r"lacks model\.embed_tokens_per_layer\.weight"),
        ({"enable_moe_block": True, "num_experts": 2}, r"lacks model\.layers\.0\.router\.proj"),
    ],
)  # fmt: skip
def test_settings_of_another_model(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = gguf_models.build("gemma4", tmp_path / "model")
    with pytest.raises(QtoolError, match=message):
        source_of(folder, **changes)


def _with(source: GgufSource, key: str, value: Value | None) -> GgufSource:
    metadata = {k: v for k, v in source.metadata.items() if k != f"gemma4.{key}"}
    return replace(source, metadata=metadata | ({} if value is None else {f"gemma4.{key}": value}))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.key_length_swa", None, "lacks gemma4.attention.key_length_swa"),
        ("attention.key_length", u32(0), "does not rotate a leading share of a head of 0"),
        ("attention.sliding_window_pattern", array(Kind.BOOL, [True] * 6), "of which the last is"),
        ("attention.sliding_window_pattern", array(Kind.BOOL, [False]), "true and false for each"),
        ("feed_forward_length", array(Kind.INT32, [96] * 5), "a list has not as many numbers"),
        ("feed_forward_length", array(Kind.INT32, [96] * 6), "feed_forward_length is .* no sett"),
        ("feed_forward_length", array(Kind.INT32, [96] * 5 + [0]), "feed_forward_length is a list"),
        ("attention.head_count_kv", array(Kind.INT32, [1, 1, 1, 1, 1, 9]), "9 of keys"),
        ("attention.head_count_kv", array(Kind.INT32, [1, 2, 1, 1, 1, 1]), "head_count_kv is"),
        ("rope.dimension_count", u32(16), "rope.dimension_count is 16"),
        ("attention.shared_kv_layers", u32(2), "feed_forward_length is"),
    ],
)
def test_files_that_no_checkpoint_is(
    key: str, value: Value | None, message: str, tmp_path: Path
) -> None:
    source = source_of(gguf_models.build("gemma4-e2b", tmp_path / "model"))
    with pytest.raises(QtoolError, match=message):
        hf_model(_with(source, key, value))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    "odd", [np.linspace(1, 2, 16), np.ones(8), np.full(16, -1), np.arange(16)[::-1]]
)
def test_other_divisors(odd: NDArray[Any], tmp_path: Path) -> None:
    source = source_of(gguf_models.build("gemma4", tmp_path / "model"))
    raw = odd.astype(np.float32).view(np.uint8).reshape(1, -1)
    made = SourceTensor("rope_freqs.weight", odd.shape, F32, lambda a, b: raw[a:b])
    with pytest.raises(UnsupportedError, match="does not rotate a leading share of a head of 32"):
        hf_model(replace(source, tensors=(made, *source.tensors[1:])))
    with pytest.raises(FormatError, match="no rotation factors"):
        hf_model(replace(source, tensors=source.tensors[1:]))


@pytest.mark.parametrize(
    "name", [pytest.param("gemma4-26b-a4b", marks=pytest.mark.slow), "gemma4-e2b"]
)
def test_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """plan, quantize, inspect, verify and convert of a small model, by the checkpoint or a file."""
    call = quantizing.caller(monkeypatch, capfd)
    folder = gguf_models.build(name, tmp_path / "model", dtype="bfloat16")
    tokens = small.gemma4(byte_tokens=40)
    small.save(folder, {"tokenizer.json": tokens, "tokenizer_config.json": small.GEMMA4_CONFIG})
    f16, direct, later = (tmp_path / f"{n}.gguf" for n in ("f16", "direct", "later"))
    planned = json.loads(call("plan", folder, "--recipe", "q4_k_m", "--json").out)
    assert call("quantize", folder, "--recipe", "bf16", "-o", f16).status == 0
    assert call("quantize", folder, "--recipe", "q4_k_m", "-o", direct).status == 0
    assert call("quantize", f16, "--recipe", "q4_k_m", "-o", later).status == 0
    types = [
        {t["name"]: t["dtype"] for t in json.loads(call("inspect", f, "--json").out)["tensors"]}
        for f in (direct, later)
    ]
    assert types[0] == types[1] and len(types[0]) == len(planned["tensors"])
    for file in (f16, direct, later):
        said = call("verify", file, "--against", folder)
        assert said.status == 0 and "nothing wrong" in said.out, said.out + said.err
    assert call("convert", f16, "--to", "hf", "-o", tmp_path / "back").status == 0
    again = call("quantize", tmp_path / "back", "--recipe", "bf16", "-o", tmp_path / "again.gguf")
    assert again.status == 0 and "nothing wrong" in call("verify", tmp_path / "again.gguf").out


def test_experts_one_by_one_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As safetensors recipes write them; a gap is found all the same."""
    call = quantizing.caller(monkeypatch, capfd)
    folder = gguf_models.build("gemma4-26b-a4b", tmp_path / "model", dtype="float16")
    options = ["--recipe", "w4g128-rtn", "--set", "weights.group_size=32"]
    options += ["--set", "indivisible=dense", "-o", tmp_path / "out"]
    assert call("quantize", folder, *options).status == 0
    said = call("verify", tmp_path / "out", "--against", folder)
    assert said.status == 0 and "(tensors)" not in said.out, said.out
    file = tmp_path / "out/model.safetensors"
    state = {k: v for k, v in load_file(file).items() if ".layers.2.experts." not in k}
    save_file(state, file, {"format": "pt"})
    said = call("verify", tmp_path / "out")
    assert said.status == 1 and "model.layers.2.experts.gate_up_proj" in said.out, said.out
