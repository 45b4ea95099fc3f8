"""What other tools write passes `qtool verify`, without an error and without a warning; and what
was made of it by a lie or an accident does not."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import other_tools as other
import pytest

from qtool.formats.gguf_values import Value, string, strings, u32
from qtool.gguf_types import FLOATS
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact


def serious(path: Path, engine: str | None = None) -> list[Finding]:
    verdict = verify_artifact(path, engine=engine, threads=1)
    return [f for f in verdict.findings if f.severity != "note"]


ATTENTION = {f"1.{name}": other.dense for name in other.LINEARS if name.startswith("self_attn")}
MADE: dict[str, tuple[other.Store, Mapping[str, other.Store], Mapping[str, Any]]] = {
    "AutoAWQ": (other.awq, {}, other.AWQ),
    "GPTQModel": (other.gptq(), {}, other.GPTQ),
    "AutoRound": (other.gptq(signed=True), {}, other.GPTQ),
    "llm-compressor": (other.pack_quantized, {}, other.CT),
    "a dense sparsity_config": (
        other.pack_quantized, {},
        {**other.CT, "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "targets": []}},
    ),
    "an expression that counts": (
        other.pack_quantized, ATTENTION,
        {**other.CT, "ignore": ["lm_head", r"re:model\.layers\.[1-9]{1}\.self_attn\..*"]},
    ),
    "an expression that repeats": (
        other.pack_quantized, ATTENTION,
        {**other.CT, "ignore": ["lm_head", r"re:.*layers\.(1|2)?\.self_attn.*"]},
    ),
    "Qwen's FP8": (other.fp8_blocks, {}, other.FP8),
    "bitsandbytes": (other.int8, {}, other.INT8),
}  # fmt: skip


@pytest.mark.parametrize("engine", [None, "vllm"])
@pytest.mark.parametrize("name", MADE)
def test_others_pass(name: str, engine: str | None, tmp_path: Path) -> None:
    store, left, config = MADE[name]
    engine = None if name == "bitsandbytes" else engine
    path = other.folder(tmp_path / "out", other.model(store, left), config)
    assert not serious(path, engine)


@pytest.mark.parametrize(
    "said",
    [
        {"format": "sparse-24-bitmask", "targets": ["Linear"]},
        {"format": "dense", "targets": ["Linear"]},
    ],
)
def test_sparse_ones_are_refused_by_engines(said: dict[str, Any], tmp_path: Path) -> None:
    config = {**other.CT, "sparsity_config": said}
    path = other.folder(tmp_path / "out", other.model(other.pack_quantized), config)
    assert "engine-format" in {f.check for f in serious(path, "vllm")}


def test_blocks_of_fp8_are_those_of_a_layers_own_group(tmp_path: Path) -> None:
    """A later group of another kind does not hide them, nor do they bind its layers."""
    float8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    blocks = {**float8, "strategy": "block", "block_structure": [128, 128]}
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    first = {"targets": ["re:.*mlp.*"], "weights": blocks, "input_activations": inputs}
    second = {
        "targets": ["re:.*self_attn.*"], "weights": {**float8, "strategy": "channel"},
        "input_activations": inputs,
    }  # fmt: skip

    def channel(module: str, weight: Any) -> other.Tensors:
        whole = other.fp8_blocks(module, weight)[f"{module}.weight"]
        scale = np.ones((len(weight), 1), np.float32)
        return {f"{module}.weight": whole, f"{module}.weight_scale": ("F32", scale)}

    def block(module: str, weight: Any) -> other.Tensors:
        stored = other.fp8_blocks(module, weight)
        renamed = f"{module}.weight_scale"
        return {f"{module}.weight": stored[f"{module}.weight"],
                renamed: stored[f"{module}.weight_scale_inv"]}  # fmt: skip

    left = {name: channel for name in other.LINEARS if name.startswith("self_attn")}
    config = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": first, "group_1": second},
    }  # fmt: skip
    path = other.folder(tmp_path / "out", other.model(block, left), config)
    verdict = verify_artifact(path, engine="vllm", tp=8, threads=1)
    found = [f for f in verdict.findings if f.check == "engine-block-split"]
    assert found and all(".mlp." in f.message for f in found)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("model.layers.0.mlp.experts.999999.w1.weight", {}),
        ("model.layers.0.mlp.experts.999999999.w1.weight", {}),
        (f"model.layers.0.mlp.experts.{'9' * 5000}.w1.weight", {}),
        (f"model.layers.{'9' * 5000}.mlp.w1.weight", {}),
        ("model.layers.0.x", {"num_hidden_layers": 10**9}),
        ("model.layers.0.mlp.experts.3.w1.weight", {"num_local_experts": 99_999}),
    ],
)
def test_numbers_beyond_reason(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    tensors = other.model(other.gptq()) | {name: other.bfloat16(np.ones((32, 32)))}
    path = other.folder(tmp_path / "out", tensors, other.GPTQ, **config)
    start = time.process_time()
    assert serious(path)
    assert time.process_time() - start < 5


# GGUF files that hold no language model


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (
            {"general.architecture": string("clip"), "general.type": string("mmproj")},
            "(mmproj), no language model",
        ),
        ({"general.architecture": string("clip")}, "(mmproj), no language model"),
        (
            {"general.architecture": string("llama"), "general.type": string("adapter")},
            "(LoRA), no language model",
        ),
    ],
)
def test_other_ggufs(metadata: dict[str, Value], said: str, tmp_path: Path) -> None:
    kind = next(one for one in FLOATS if one.name == "F32")
    weight = np.ones((8, 64), np.float32)
    path = gguf_files.write(tmp_path / "x.gguf", metadata, {"mm.0.weight": (weight, kind)})
    verdict = verify_artifact(path, engine="llama.cpp", threads=1)
    assert [f.severity for f in verdict.findings] == ["note"]
    assert said in verdict.findings[0].message
    weight = np.full((8, 64), np.nan, np.float32)
    path = gguf_files.write(tmp_path / "y.gguf", metadata, {"mm.0.weight": (weight, kind)})
    assert [f.check for f in serious(path)] == ["values"]


@pytest.mark.parametrize(
    ("key", "number", "severity"),
    [
        ("padding_token_id", 0xFFFFFFFF, None),
        ("padding_token_id", 64, "warning"),
        ("eos_token_id", 64, "error"),
        ("eos_token_id", 0xFFFFFFFF, "error"),
    ],
)
def test_token_ids_of_ggufs(key: str, number: int, severity: str | None, tmp_path: Path) -> None:
    kind = next(one for one in FLOATS if one.name == "F32")
    metadata: dict[str, Value] = {
        "general.architecture": string("strange"),
        "strange.block_count": u32(1), "strange.embedding_length": u32(64),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.tokens": strings([f"t{n}" for n in range(64)]),
        f"tokenizer.ggml.{key}": u32(number),
    }  # fmt: skip
    weight = np.ones((64, 64), np.float32)
    names = ("token_embd.weight", "blk.0.attn_q.weight")
    path = gguf_files.write(tmp_path / "x.gguf", metadata, {n: (weight, kind) for n in names})
    found = [f.severity for f in serious(path) if f.check == "tokenizer"]
    assert found == ([] if severity is None else [severity])
