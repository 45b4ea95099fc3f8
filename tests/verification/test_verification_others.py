"""What other tools write passes `qtool verify`, without an error and without a warning; and what
was made of it by a lie or an accident does not."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.checkpoints.holes import torn, zero_stretches
from qtool.hub import tiny_folder
from qtool.verification.by_table import row_of
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.formats import other_tools as other
from support.verification.verifying import serious

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


# Damage that leaves every length right


def damaged(path: Path, name: str, change: Callable[[NDArray[Any]], object]) -> list[Finding]:
    """What is said of a GPTQ artifact after a change of one tensor of four blocks."""
    tensors = other.model(other.gptq(), blocks=4)
    kind, stored = tensors[name]
    array = stored.copy()
    found = change(array)
    tensors[name] = kind, found if isinstance(found, np.ndarray) else array
    return serious(other.folder(path / "out", tensors, other.GPTQ, num_hidden_layers=4))


def hole(first: int, last: int) -> Callable[[NDArray[Any]], None]:
    def change(array: NDArray[Any]) -> None:
        array.reshape(-1).view(np.uint8)[first:last] = 0

    return change


DOWN = "model.layers.1.mlp.down_proj"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (f"{DOWN}.qweight", hole(16_384, 65_536), ("error", "codes")),
        (f"{DOWN}.qweight", hole(3000, 7300), ("error", "codes")),
        (f"{DOWN}.qweight", hole(3000, 7000), None),  # too short to tell
        (EMBEDDING, hole(512 * 100 + 200, 512 * 140), ("error", "dense-values")),
        (EMBEDDING, hole(512 * 100, 512 * 140), ("warning", "dense-values")),
        (EMBEDDING, hole(512 * 100, 512 * 110), None),  # tokens that are kept free
        (EMBEDDING, hole(512 * other.TOKENS, 512 * 320), None),  # rows that no token has
    ],
)
def test_holes(
    name: str, change: Callable[[NDArray[Any]], None], expected: tuple[str, str] | None,
    tmp_path: Path,
) -> None:  # fmt: skip
    found = damaged(tmp_path, name, change)
    assert [(f.severity, f.check) for f in found] == ([expected] if expected else [])
    assert not found or name.startswith(found[0].name.removesuffix(".weight"))


@pytest.mark.parametrize("width", [512, 4096, 65_536])
def test_where_stretches_are(width: int) -> None:
    rng = np.random.default_rng(width)
    for _ in range(200):
        data = rng.integers(1, 256, 40_000).astype(np.uint8)
        first, length = (int(n) for n in rng.integers(0, 20_000, 2))
        data[first : first + length] = 0
        expected = [(first, first + length)] if length >= 4096 else []
        assert zero_stretches(data) == expected
        inside = any(64 <= place % width <= width - 64 for place in (first, first + length))
        torn_bytes = length if expected and inside else 0
        assert torn(data, expected, width) == torn_bytes
    assert not zero_stretches(np.ones(4096, np.uint8))


def test_lost_columns_and_rows_are_no_holes(tmp_path: Path) -> None:
    """A model that was made smaller, and padded again; and one of which AWQ got zeros."""

    def smaller(store: other.Store) -> other.Store:
        def stored(module: str, weight: NDArray[np.float32]) -> other.Tensors:
            weight = weight + np.float32(1e-6)
            weight[:, -128:] = 0
            weight[-64:] = 0
            return store(module, weight)

        return stored

    columns = np.ones((64, 20_000), np.uint8)
    columns[:, 14_000:] = 0
    columns[20:22] = 0
    columns[30:31, :9000] = 0
    assert len(zero_stretches(columns.reshape(-1))) > 60
    assert torn(columns.reshape(-1), zero_stretches(columns.reshape(-1)), 20_000) == 15_000
    for name, store, config in (("awq", other.awq, other.AWQ), ("int8", other.int8, other.INT8)):
        tensors = other.model(smaller(store), {"attn.o_proj": store})
        assert not serious(other.folder(tmp_path / name, tensors, config)), name


def test_scales_of_another_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def garbage(array: NDArray[Any]) -> NDArray[Any]:
        return rng.integers(1, 0x7B00, array.shape).astype("<u2").view(np.float16)

    (found,) = damaged(tmp_path / "all", f"{DOWN}.scales", garbage)
    assert (found.severity, found.check) == ("error", "alike")

    def one(array: NDArray[Any]) -> None:
        array[1, 7] = 60_000  # a bit of the exponent

    (found,) = damaged(tmp_path / "one", f"{DOWN}.scales", one)
    assert found.check == "alike" and found.name == f"{DOWN}.weight"

    def larger(array: NDArray[Any]) -> None:
        array *= 30

    assert not damaged(tmp_path / "larger", f"{DOWN}.scales", larger)


def test_codes_of_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def garbage(array: NDArray[Any]) -> NDArray[Any]:
        return rng.integers(-(2**31), 2**31 - 1, array.shape).astype("<i4")

    (found,) = damaged(tmp_path, f"{DOWN}.qweight", garbage)
    assert (found.severity, found.check, found.name) == ("warning", "codes", f"{DOWN}.weight")


def test_a_block_that_is_another(tmp_path: Path) -> None:
    tensors = other.model(other.gptq())
    for name in tensors:
        if ".layers.1." in name:
            tensors[name] = tensors[name.replace(".layers.1.", ".layers.0.")]
    (found,) = serious(other.folder(tmp_path / "out", tensors, other.GPTQ))
    assert (found.severity, found.check) == ("warning", "alike")
    assert found.message.startswith("7 matrices (model.layers.1.")


def test_another_matrix_is_not_one_of_other_zeros(tmp_path: Path) -> None:
    """Against its source: layers that changed places, and codes of nothing."""
    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    tensors = other.model(other.awq)
    keys = [n for n in tensors if ".0.self_attn.k_proj." in n]
    values = [n.replace("k_proj", "v_proj") for n in keys]
    for one, two in zip(keys, values, strict=True):
        tensors[one], tensors[two] = tensors[two], tensors[one]
    words = tensors[f"{DOWN}.qweight"][1]
    rng = np.random.default_rng(0)
    tensors[f"{DOWN}.qweight"] = "I32", rng.integers(0, 2**31, words.shape).astype("<i4")
    path = other.folder(tmp_path / "out", tensors, other.AWQ)
    verdict = verify_artifact(path, against=source, threads=1)
    said = {f.check for f in verdict.findings if f.severity == "error"}
    assert said == {"layer-error", "swapped"}
    (found,) = [f for f in verdict.findings if f.check == "swapped"]
    assert found.message.startswith("2 matrices stand under names of another: ")
    (found,) = [f for f in verdict.findings if f.check == "layer-error"]
    assert "1 matrix farther from the source" in found.message


# Configs and files that do not belong


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("config.json", None, ("error", "quantized-config", "no config.json")),
        ("tokenizer.json", {}, ("error", "tokenizer", "no vocabulary")),
        ("extra.safetensors", b"", ("warning", "files", "beside model.safetensors")),
        ("num_hidden_layers", 1, ("warning", "tensors", "beyond the 1 that config.json says")),
        ("quantization_config", None, ("warning", "quantized-config", "transformers does not")),
    ],
)
def test_what_does_not_belong(
    file: str, content: Any, expected: tuple[str, str, str], tmp_path: Path
) -> None:
    path = other.folder(tmp_path / "out", other.model(other.gptq()), other.GPTQ)
    config = json.loads((path / "config.json").read_text())
    if file == "config.json":
        (path / file).unlink()
        (path / "quantize_config.json").write_text(json.dumps(other.GPTQ))
    elif file == "tokenizer.json":
        (path / file).write_text(json.dumps(content))
    elif file == "extra.safetensors":
        (path / file).write_bytes((path / "model.safetensors").read_bytes())
    elif file == "num_hidden_layers":
        (path / "config.json").write_text(json.dumps(config | {file: content}))
    else:
        config.pop(file)
        (path / "config.json").write_text(json.dumps(config))
        (path / "quantize_config.json").write_text(json.dumps(other.GPTQ))
    (found,) = serious(path)
    assert (found.severity, found.check) == expected[:2] and expected[2] in found.message


def test_layers_for_further_tokens_belong(tmp_path: Path) -> None:
    tensors = other.model(other.gptq(), blocks=3)
    more = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    assert not serious(other.folder(tmp_path / "out", tensors, other.GPTQ, **more))


def test_against_another_model(tmp_path: Path) -> None:
    """Of more blocks: that they are lost is no matter of prediction."""
    source = other.folder(tmp_path / "source", other.model(other.dense, blocks=8), {})
    text = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(text | {"num_hidden_layers": 8}))
    path = other.folder(tmp_path / "out", other.model(other.gptq()), other.GPTQ)
    verdict = verify_artifact(path, against=source, threads=1)
    (found,) = [f for f in verdict.findings if f.check == "against"]
    assert "another model" in found.message and "multi-token" not in found.message


def test_a_class_with_other_names_is_told_by_nothing() -> None:
    """transformers 5.24 runs EXAONE as LlamaForCausalLM, by renaming what its checkpoints hold."""
    config = json.loads((tiny_folder() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and row_of(config) is not None
    assert row_of({**config, "model_type": "exaone"}) is None
