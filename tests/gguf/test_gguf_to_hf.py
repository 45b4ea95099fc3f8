"""GGUF to Hugging Face: every architecture of the table, there and back, and what is refused."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool import native_gguf
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting import gguf_to_hf as convert
from qtool.converting.resume import at_once
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats.gguf_values import Value, f32, string, u32
from qtool.gguf.architectures import TABLE
from qtool.gguf.source import GgufSource, SourceTensor, as_floats
from qtool.gguf.to_hf.keys import OF_SIGHT
from qtool.gguf.to_hf.model import hf_model
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.gguf_types import BY_NAME, F32
from qtool.messages.progress import Progress
from qtool.native import floats
from support.gguf import gguf_models
from support.gguf.families import hybrid, newest, remote, sparse, states
from support.gguf.gguf_to_hf import bytes_of, keys_of, source_of, without_tokenizers
from support.runs import quantizing

__all__ = ["without_tokenizers"]


# One of each way in which rows, names or settings are rewritten; the others are marked slow.
_QUICK = ("llama-3.1", "qwen3-moe", "gemma3-linear", "phi3-long", "stablelm-12b", "gpt-neox-rotary",
          "gpt-neox", "glm4-moe", "qwen3-vl", "ministral3", "olmo3", "hunyuan-alpha", "nemotron",
          "phi2-rotary", "gemma4-26b-a4b", "gemma4-heads", "gemma4-e2b", "lfm2", "hunyuan-moe",
          "gpt2", "falcon", "nemotron-h-moe", "deepseek-v3", "gpt-oss", "llama4", "granite-4-h-moe",
          "qwen3-next", "glm-5", "dbrx", "hrm-text", "apertus", "ling-2", "smolvlm",
          "glm4v", "qwen4-exp", "laguna")  # fmt: skip
# A GGUF file does not say which gelu a model has; that of the class comes back, and here it is not.
_OTHER_GELU = ("gpt-neox-rotary",)
# Logarithms of rates, or norms that are multiplied, are rounded in a file.
_NEARLY = {*states.MODELS, *newest.MULTIPLIED}
_OTHER_RAMP = ("gpt-oss",)  # and not whether YaRN's ramp is rounded, which gpt-oss is said not to
# Its decoder alone is a Llama, whose elements llama.cpp rotates in other pairs.
_OTHER_ROWS = {"paddleocr-vl": (".attn_q.weight", ".attn_k.weight")}
# In MXFP4, which comes back as plain numbers; see below.
_NO_WAY_BACK = sparse.NO_WAY_BACK | remote.NO_WAY_BACK
_EACH_PLAIN = [
    name for name in gguf_models.MODELS if name not in sparse.PACKED and name not in _NO_WAY_BACK
]


def _marked(name: str) -> Any:
    return name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow)


_EACH = [_marked(name) for name in _EACH_PLAIN]


def _rows(source: GgufSource, name: str) -> list[bytes]:
    tensor = next(t for t in source.tensors if t.name == name)
    return [row.tobytes() for row in tensor.read(0, tensor.rows)]


def back(source: GgufSource, out: Path, dtype: str | None = None) -> convert.Converted:
    return convert.convert_to_hf(
        source, out, dtype, 1 << 40, Progress(quiet=True), lambda _: at_once(out)
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if usual and name in _QUICK else [pytest.mark.slow])
        for number, name in enumerate(_EACH_PLAIN)
        for dtype, usual in (("float16", number % 2 == 0), ("bfloat16", number % 2 == 1))
    ],
)
def test_there_and_back(name: str, dtype: str, tmp_path: Path) -> None:
    """HF -> GGUF -> HF -> GGUF: the same bytes, types and keys; nothing is called inexact."""
    first = source_of(gguf_models.build(name, tmp_path / "model", dtype=dtype))
    made = back(first, tmp_path / "back")
    again = source_of(tmp_path / "back")
    assert made.certificate.exact
    one, other = bytes_of(first), bytes_of(again)
    for key in [key for key in one if name in _OTHER_ROWS and key.endswith(_OTHER_ROWS[name])]:
        kept = [sorted(_rows(t, key)) for t in (first, again)]
        del one[key], other[key]
        assert kept[0] == kept[1]
    assert other == one
    own, others = keys_of(first), keys_of(again)
    for key in hybrid.SAID_BY_OTHERS.get(name, ()):
        own.pop(key, None), others.pop(key, None)
    if again.architecture != first.architecture:  # the text alone of a model that also sees
        assert set(own) - set(others) <= set(OF_SIGHT)
        own = {key: value for key, value in own.items() if key in others}
    assert others == own


@pytest.mark.parametrize("name", [name for name in _EACH if name not in _OTHER_GELU + _OTHER_RAMP])
def test_same_function(name: str, tmp_path: Path) -> None:
    """transformers computes the same logits, to the bit, from what comes back."""

    folder = gguf_models.build(name, tmp_path / "model")
    same_function(folder, tmp_path / "back", exact=name not in _NEARLY)


def test_the_ramp_of_gpt_oss_comes_back(tmp_path: Path) -> None:
    """As released, in a checkpoint; what is run of the file itself is what llama.cpp computes."""
    folder = gguf_models.build("gpt-oss", tmp_path / "model")
    rope = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0, "truncate": False,
            "original_max_position_embeddings": 64}  # fmt: skip
    gguf_models.rewrite_config(folder, lambda config: config.update(rope_parameters=rope))
    same_function(folder, tmp_path / "back")
    with gguf_weights(source_of(folder)) as (weights, _):
        assert weights.config["rope_scaling"]["truncate"] is True


def same_function(folder: Path, out: Path, *, exact: bool = True) -> None:
    import torch
    from transformers import AutoConfig

    made = back(source_of(folder), out)
    tokens = torch.arange(1, 25).reshape(1, -1)
    logits = []
    for path in (folder, out):
        auto = gguf_models.auto_model(AutoConfig.from_pretrained(path))
        model = auto.from_pretrained(path, dtype=torch.float32).eval()
        for parameter in model.parameters():  # sums depend on where it lies in the file
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            logits.append(model(tokens).logits.numpy())
    assert made.dtype == "float32"
    if not exact:
        assert np.allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5 * np.ptp(logits[0]))
        return
    assert np.array_equal(logits[0], logits[1])


def test_every_key_of_the_table_is_put_back() -> None:
    """A key with a rule of its own needs a way back: one missing would be an UnsupportedError."""
    from qtool.gguf.to_hf import config as to_hf_config

    by_hand = {
        "layer_types", "rope_parameters", "head_dim", "num_hidden_layers", "q_lora_rank",
        "indexer_types", "",
    }  # fmt: skip
    predicted = {row.mtp for row in TABLE.values() if row.mtp}
    for row in TABLE.values():
        if not to_hf_config.has_way_back(row.name):
            continue
        plain = {key.name for key in row.keys if key.make is None}
        for key in row.keys:
            if key.name in plain or (key.name in OF_SIGHT and row.alone) or key.setting == "":
                continue
            if key.make is not None and key.setting not in by_hand | predicted:
                assert key.name in to_hf_config._SETTINGS, key.name


def quantized(source: GgufSource, name: str, kind: str) -> GgufSource:
    """The source with one matrix as llama-quantize would store it."""
    block = BY_NAME[kind.upper()]

    def change(tensor: SourceTensor) -> SourceTensor:
        if tensor.name != name:
            return tensor
        weight = tensor.read(0, tensor.rows).view(np.float32).reshape(tensor.rows, -1)
        blocks = native_gguf.encode(np.ascontiguousarray(weight), block)
        return replace(tensor, type=block, read=lambda first, last: blocks[first:last])

    return replace(source, tensors=tuple(change(t) for t in source.tensors))


@pytest.mark.parametrize("name", [_marked(name) for name in _NO_WAY_BACK])
def test_families_without_a_way_back(name: str, tmp_path: Path) -> None:
    source = source_of(gguf_models.build(name, tmp_path / "model"))
    with pytest.raises(QtoolError, match=_NO_WAY_BACK[name]):
        hf_model(source)


@pytest.mark.parametrize("name", sparse.PACKED)
def test_experts_in_blocks_come_back_as_plain_numbers(name: str, tmp_path: Path) -> None:
    first = source_of(gguf_models.build(name, tmp_path / "model", dtype="bfloat16"))
    made = back(first, tmp_path / "back")
    again = source_of(tmp_path / "back")
    assert made.dequantized["MXFP4"] == 4 and made.certificate.exact
    others = {tensor.name: tensor for tensor in again.tensors}
    for one in first.tensors:
        other = others.pop(one.name)
        own, now = (as_floats(t, t.read(0, t.rows)) for t in (one, other))
        assert np.array_equal(own, now), one.name
    assert not others and keys_of(again) == keys_of(first)


@pytest.mark.parametrize("name", ["gpt-oss", "llama4", "deepseek-v3", "granite-4-h-moe", "lfm2"])
def test_what_is_run_is_what_is_converted(name: str, tmp_path: Path) -> None:
    """A file's tensors read a few rows, or experts, at a time."""
    source = source_of(gguf_models.build(name, tmp_path / "model", dtype="bfloat16"))
    back(source, tmp_path / "back")
    written = Checkpoint.open(tmp_path / "back")
    with gguf_weights(source) as (weights, named):
        assert set(weights.tensors) == set(written.tensors)
        for key, info in weights.tensors.items():
            ends = [*range(0, info.shape[0], 2), info.shape[0]]
            parts = [weights.part(key, a, b) for a, b in pairwise(ends)]
            there = written.float32(key)
            assert info.shape == there.shape
            found = np.concatenate(parts).view(np.float32)
            if key.endswith("A_log"):  # the logarithm of what a file has
                found = floats.from_bfloat16(floats.to_bfloat16(found))
            assert np.array_equal(found, there.reshape(-1)), key
    assert {name for tensor in named.tensors for name in tensor.origin} == set(written.tensors)


def test_quantized_tensors_are_dequantized_and_counted(tmp_path: Path) -> None:
    folder = gguf_models.build("qwen3", tmp_path / "model")
    source = quantized(source_of(folder), "blk.0.ffn_gate.weight", "Q8_0")
    made = back(source, tmp_path / "back", "bfloat16")
    assert made.dequantized == {"Q8_0": 1}
    assert not made.certificate.exact
    tensor = next(t for t in source.tensors if t.name == "blk.0.ffn_gate.weight")
    exact = native_gguf.dequantize(tensor.read(0, tensor.rows), tensor.type, 64, "bfloat16")
    written = Checkpoint.open(tmp_path / "back").array("model.layers.0.mlp.gate_proj.weight")
    assert np.array_equal(written, exact)


def test_too_large_for_float16(tmp_path: Path) -> None:
    source = source_of(gguf_models.build("qwen3", tmp_path / "model"))
    large = np.full((96, 64), 1e6, np.float32).view(np.uint8)
    tensors = tuple(
        replace(t, read=lambda a, b: large[a:b]) if t.name == "blk.1.ffn_up.weight" else t
        for t in source.tensors
    )
    with pytest.raises(UnsupportedError, match=r"mlp\.up_proj.* 1e\+06 .*--dtype bfloat16"):
        back(replace(source, tensors=tensors), tmp_path / "back", "float16")
    assert not (tmp_path / "back").exists()


def test_refusals(tmp_path: Path) -> None:
    source = source_of(gguf_models.build("llama-3.1", tmp_path / "model"))

    def with_keys(**keys: object) -> GgufSource:
        return replace(source, metadata={**source.metadata, **keys})  # type: ignore[arg-type]

    with pytest.raises(UnsupportedError, match=r"'rwkv7' is not in the table .*llama"):
        hf_model(with_keys(**{"general.architecture": string("rwkv7")}))
    without = tuple(t for t in source.tensors if t.name != "blk.1.ffn_up.weight")
    with pytest.raises(FormatError, match=r"lacks blk\.1\.ffn_up\.weight"):
        hf_model(replace(source, tensors=without))
    extra = replace(source.tensors[-1], name="blk.0.attn_sinks.weight")
    with pytest.raises(FormatError, match=r"no module .* 'blk\.0\.attn_sinks\.weight'"):
        hf_model(replace(source, tensors=(*source.tensors, extra)))
    odd = np.linspace(1, 3, 16, dtype=np.float32).view(np.uint8).reshape(1, -1)
    freqs = SourceTensor("rope_freqs.weight", (16,), F32, lambda a, b: odd[a:b])
    others = tuple(t for t in source.tensors if t.name != "rope_freqs.weight")
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight holds no divisors"):
        hf_model(replace(source, tensors=(*others, freqs)))
    with pytest.raises(UnsupportedError, match=r"key_length is 32, and no setting of Llama"):
        hf_model(
            replace(
                source,
                tensors=others,
                metadata={
                    **source.metadata,
                    "llama.rope.dimension_count": u32(16),
                    "llama.attention.key_length": u32(32),
                },
            )
        )


def test_shapes_are_those_of_the_metadata(tmp_path: Path) -> None:
    source = source_of(gguf_models.build("llama-3.1", tmp_path / "model"))

    def with_shape(name: str, shape: tuple[int, ...]) -> GgufSource:
        tensors = tuple(replace(t, shape=shape) if t.name == name else t for t in source.tensors)
        return replace(source, tensors=tensors)

    for name, shape in (("blk.0.ffn_up.weight", (2, 48, 64)), ("blk.1.attn_q.weight", (126, 64))):
        with pytest.raises(FormatError, match=rf"{name} has the shape .*, and the metadata say"):
            hf_model(with_shape(name, shape))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.sliding_window", u32(8), "which no setting"),
        ("llama.expert_weights_scale", f32(2.5), "which no setting"),
        ("llama.block_count", u32(1_000_000), "block_count is 1000000, and there are only"),
        ("llama.attention.head_count", u32(0), "head_count is 0"),
        ("llama.attention.head_count", string("4"), "expected an integer"),
        ("llama.attention.head_count", f32(4), "expected an integer"),
        ("llama.rope.freq_base", f32(float("nan")), "freq_base is nan"),
        ("tokenizer.ggml.bos_token_id", string("1"), "expected a token below 96"),
        ("tokenizer.ggml.bos_token_id", u32(96), "expected a token below 96"),
    ],
)
def test_keys_are_checked(tmp_path: Path, key: str, value: Value, said: str) -> None:
    source = source_of(gguf_models.build("llama-3.1", tmp_path / "model"))
    with pytest.raises(QtoolError, match=said):
        hf_model(replace(source, metadata={**source.metadata, key: value}))


def test_keys_that_are_needed(tmp_path: Path) -> None:
    source = source_of(gguf_models.build("gemma2", tmp_path / "model"))
    for name in ("block_count", "attention.head_count", "embedding_length"):
        less = {k: v for k, v in source.metadata.items() if k != f"gemma2.{name}"}
        with pytest.raises(FormatError, match=f"lacks gemma2.{name}"):
            hf_model(replace(source, metadata=less))
    without = tuple(t for t in source.tensors if t.name != "token_embd.weight")
    with pytest.raises(FormatError, match=r"lacks token_embd\.weight"):
        hf_model(replace(source, tensors=without))


def test_config_says_what_llama_cpp_takes_for_granted(tmp_path: Path) -> None:
    back(source_of(gguf_models.build("gemma2", tmp_path / "model")), tmp_path / "back")
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["query_pre_attn_scalar"] == 32
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert config["tie_word_embeddings"] is True


def test_a_gguf_file_is_a_source_of_every_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The packed tensors are those of the checkpoint; a quantized source has to be asked for."""
    monkeypatch.undo()  # tiny has a tokenizer
    call = quantizing.caller(monkeypatch, capfd)
    monkeypatch.chdir(tmp_path)
    for recipe in ("f32", "q4_k_m"):
        assert call("quantize", "tiny", "--recipe", recipe, "-o", f"{recipe}.gguf").status == 0
    assert call("quantize", "tiny", "--recipe", "w4g128-rtn", "-o", "a").status == 0
    assert call("quantize", "f32.gguf", "--recipe", "w4g128-rtn").status == 0
    one, two = Checkpoint.open("a"), Checkpoint.open("f32-w4g128-rtn")
    names = [name for name in one.tensors if name.endswith(("qweight", "qzeros", "scales"))]
    assert len(names) == 3 * 28
    assert all(np.array_equal(one.raw(name), two.raw(name)) for name in names)
    said = call("quantize", "q4_k_m.gguf", "--recipe", "w4g128-rtn", "-o", "b")
    assert said.status == 1 and "quantized already" in said.err
    said = call("quantize", "q4_k_m.gguf", "--recipe", "w4g128-rtn", "-o", "b", "--requantize")
    assert said.status == 0 and "warning: the source is quantized already (Q4_K" in said.err
    made = json.loads(Path("b/qtool.json").read_text())["source"]["made_from"]
    assert made["format"] == "gguf" and "Q4_K" in made["types"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "f32.gguf", "q4_k_m.gguf", "a", "f32-w4g128-rtn", "b"
    }  # fmt: skip


def test_a_plan_of_a_gguf_file_is_that_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the headers alone; said of it is what is made in between, and that it is quantized."""
    monkeypatch.undo()
    call = quantizing.caller(monkeypatch, capfd)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    found = {}
    for name in ("f32", "q8_0"):
        file = tmp_path / f"{name}.gguf"
        assert call("quantize", "tiny", "--recipe", name, "-o", file).status == 0
        more = ["--requantize"] if name == "q8_0" else []
        said = call("plan", file, "--recipe", "w4g128-awq", "--engine", "vllm", "--json", *more)
        assert said.status == 0, said.err
        found[name] = json.loads(said.out)
    expected = json.loads(call("plan", "tiny", "--recipe", "w4g128-awq", "--json").out)
    for made in found.values():
        names = [{t["name"] for t in plan["tensors"]} for plan in (made, expected)]
        assert names[0] == names[1]
        assert any("a checkpoint of " in note for note in made["notes"])
    assert found["f32"]["memory"].keys() == expected["memory"].keys()
    assert "quantized already (Q8_0)" in found["q8_0"]["warnings"][0]
    refused = call("plan", tmp_path / "q8_0.gguf", "--recipe", "w4g128-awq")
    assert refused.status == 1 and "give --requantize" in refused.err
    wide = [tmp_path / "f32.gguf", "--recipe", "w4g128-rtn", "--set", "weights.group_size=512",
            "--set", "indivisible=dense"]  # fmt: skip
    refused = call("plan", *wide)
    assert refused.status == 1
    assert refused.err.startswith(f"error: {tmp_path / 'f32.gguf'}: with recipe w4g128-rtn no ")
    assert call("quantize", *wide, "-o", tmp_path / "out").err == refused.err
    assert not [*(tmp_path / "temporary").iterdir()]
