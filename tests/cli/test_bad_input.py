"""What users get wrong: one sentence, exit status 1, and no folder left, not even a hidden one."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.runs import quantizing
from support.runs.bad_models import (
    RECIPES,
    Q,
    arguments,
    assert_one_sentence,
    model,
    original,
    replace,
    snapshot,
)
from support.runs.quantizing import Call

__all__ = ["model", "original"]

NORM = "model.layers.1.input_layernorm.weight"


EMBEDDING = "model.embed_tokens.weight"


def test_the_good_model_works(model: Path, tmp_path: Path, call: Call) -> None:
    """Else every failure below could be one of the fixture."""
    for recipe in RECIPES:
        assert call(*arguments(model, recipe, tmp_path / recipe)).status == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "index", "value", "dtype"),
    [
        (Q, (5, 7), float("nan"), np.float32),
        (Q, (0, 63), float("inf"), np.float16),
        (NORM, (9,), float("-inf"), np.float32),
    ],
)
def test_no_number(
    recipe: str, name: str, index: tuple[int, ...], value: float, dtype: Any,
    model: Path, tmp_path: Path, call: Call,
) -> None:  # fmt: skip
    replace(model, name, index, value, dtype)
    before = snapshot(tmp_path)
    said = call(*arguments(model, recipe, tmp_path / "out"))
    where = f"tensor {name!r} holds {value} at {list(index)}"
    assert_one_sentence(said, str(model / "model.safetensors"), where, "must be finite")
    assert snapshot(tmp_path) == before


def test_a_matrix_is_read_once(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for what is no number takes no second reading of the file."""
    read: list[tuple[object, ...]] = []
    checkpoint = quantizing.pipeline.Checkpoint

    def counted(kind: str) -> Any:
        plain = getattr(checkpoint, kind)

        def count(source: Any, name: str, *where: int) -> Any:
            if source.folder == model:
                read.append((name, kind, *where))
            return plain(source, name, *where)

        return count

    for kind in ("raw", "part", "stretch"):
        monkeypatch.setattr(checkpoint, kind, counted(kind))
    assert call(*arguments(model, "w4g128-rtn", tmp_path / "out")).status == 0
    assert len(read) == len(set(read))
    kinds = {name: {kind for other, kind, *_ in read if other == name} for name, *_ in read}
    assert kinds[Q] == {"part"} and all(len(kind) == 1 for kind in kinds.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_number_in_a_row_that_no_text_uses(
    recipe: str, model: Path, tmp_path: Path, call: Call
) -> None:
    replace(model, EMBEDDING, (95, 3), float("nan"), np.float32)
    said = call(*arguments(model, recipe, tmp_path / "out"))
    assert_one_sentence(said, f"tensor {EMBEDDING!r} holds nan at [95, 3]")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_truncated_file(recipe: str, model: Path, tmp_path: Path, call: Call) -> None:
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    before = snapshot(tmp_path)
    said = call(*arguments(model, recipe, tmp_path / "out"))
    assert_one_sentence(said, str(path), "bytes")
    assert snapshot(tmp_path) == before


def no_weights(model: Path) -> list[str]:
    (model / "model.safetensors").unlink()
    return ["no *.safetensors file here"]


def pickle_only(model: Path) -> list[str]:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return ["pytorch_model.bin", "a Python pickle", "save_pretrained"]


def empty_file(model: Path) -> list[str]:
    (model / "model.safetensors").write_bytes(b"")
    return [str(model / "model.safetensors")]


def missing_shard(model: Path) -> list[str]:
    index = {"weight_map": {Q: "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["model-00001-of-00001.safetensors", "missing"]


def broken_config(model: Path) -> list[str]:
    (model / "config.json").write_text("{")
    return [str(model / "config.json")]


def already_quantized(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (model / "config.json").write_text(json.dumps(config))
    return ["already quantized", "awq"]


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-gptq"])
@pytest.mark.parametrize(
    "damage",
    [no_weights, pickle_only, empty_file, missing_shard, broken_config, already_quantized],
)
def test_no_model(
    damage: Callable[[Path], list[str]], recipe: str, model: Path, tmp_path: Path, call: Call
) -> None:
    parts = damage(model)
    before = snapshot(tmp_path)
    assert_one_sentence(call(*arguments(model, recipe, tmp_path / "out")), *parts)
    assert snapshot(tmp_path) == before


def no_config(model: Path) -> list[str]:
    (model / "config.json").unlink()
    return ["no config.json"]


def no_tokenizer(model: Path) -> list[str]:
    (model / "tokenizer.json").unlink()
    return [str(model), "no tokenizer"]


def large_tokenizer(model: Path) -> list[str]:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {c: i + 50 for c, i in content["model"]["vocab"].items()}
    path.write_text(json.dumps(content))
    return ["its tokenizer gives the id", "vocabulary of 96"]


def other_config(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    return [".weight", "96", "128", "config"]


def too_few_tensors(model: Path) -> list[str]:
    tensors = load_file(model / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, model / "model.safetensors")
    return ["1 tensor that LlamaForCausalLM needs is missing", NORM]


def unknown_architecture(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "frobnicator", "architectures": ["FrobnicatorForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    return [str(model / "config.json"), "'frobnicator'", "RTN can quantize it"]


def too_deep(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    return ["model.layers.3", "config.json"]


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq"])
@pytest.mark.parametrize(
    "damage",
    [
        no_config,
        no_tokenizer,
        large_tokenizer,
        other_config,
        too_few_tensors,
        unknown_architecture,
        too_deep,
    ],
)
def test_no_forward_pass(
    damage: Callable[[Path], list[str]], recipe: str, model: Path, tmp_path: Path, call: Call
) -> None:
    """Calibrated methods explain why they cannot run it; rounding to nearest still does, but for
    tensors that are missing or of another model than config.json, which no engine loads."""
    parts = damage(model)
    before = snapshot(tmp_path)
    assert_one_sentence(call(*arguments(model, recipe, tmp_path / "out")), *parts)
    assert snapshot(tmp_path) == before
    said = call(*arguments(model, "w4g128-rtn", tmp_path / "rtn"))
    refused = (no_config, other_config, too_few_tensors, too_deep)
    assert said.status == (damage in refused), said.err


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--set", "weights.bitz=4"], ["--set weights.bitz=4", "unknown key", "bits"]),
        (["--set", "method=magic"], ["--set method=magic", "'magic' is unknown", "gptq"]),
        (["--set", "weights.bits=9"], ["weights.bits", "8"]),
        (["--set", "weights.group_size=128"], ["64", "not divisible by group_size 128"]),
        (["--samples", "5000"], ["enough for", "but 5000 are asked for", "--samples"]),
        (["--calibration", "/nonexistent/x.txt"], ["/nonexistent/x.txt", "no such file"]),
        (["--stats", "/nonexistent/s"], ["/nonexistent/s"]),
        (["--device", "cuda"], ["no NVIDIA GPU is here", "leave --device out"]),
    ],
)
def test_what_cannot_be_asked_for(
    more: list[str], parts: list[str], model: Path, tmp_path: Path, call: Call
) -> None:
    before = snapshot(tmp_path)
    given = arguments(model, "w4g128-gptq", tmp_path / "out", *more)
    assert_one_sentence(call(*given), *parts)
    assert snapshot(tmp_path) == before


def test_no_size(model: Path, tmp_path: Path, call: Call) -> None:
    given = arguments(model, "w4g128-gptq", tmp_path / "out", "--max-shard-size", "many")
    assert_one_sentence(call(*given), "'many' is no size", status=2)


def test_no_such_device(model: Path, tmp_path: Path, call: Call) -> None:
    given = arguments(model, "w4g128-gptq", tmp_path / "out", "--device", "tpu")
    assert_one_sentence(call(*given), "--device tpu: expected auto, cpu or cuda", status=2)


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-gptq"])
def test_missing_model(recipe: str, tmp_path: Path, call: Call) -> None:
    missing = tmp_path / "missing"
    said = call("quantize", missing, "--recipe", recipe, "-o", tmp_path / "out")
    assert_one_sentence(said, f"{missing}: no such file or folder")
    said = call("quantize", f"{missing}.safetensors", "--recipe", recipe, "-o", tmp_path / "out")
    assert_one_sentence(said, "missing.safetensors: no such file or folder")
    assert not list(tmp_path.iterdir())


def test_recipe_files(model: Path, tmp_path: Path, call: Call) -> None:
    """The sentence names file, line and key."""
    path = tmp_path / "mine.yaml"
    path.write_text("method: gptq\nformat: gptq\nweights:\n  bits: 4\n  grup_size: 32\n")
    said = call("quantize", model, "--recipe", path, "-o", tmp_path / "out")
    assert_one_sentence(said, f"{path}:5: weights.grup_size: unknown key; did you mean group_size?")
    said = call("quantize", model, "--recipe", "w4g128-gtpq", "-o", tmp_path / "out")
    assert_one_sentence(said, "recipe 'w4g128-gtpq' does not exist", "w4g128-gptq")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", ["w8-rtn", "q4_k_m"])
def test_an_adapter_that_is_not_merged(
    recipe: str, model: Path, tmp_path: Path, call: Call
) -> None:
    """Its matrices were taken for the model's."""
    stem = "model.layers.0.self_attn.q_proj."
    tensors = load_file(model / "model.safetensors")
    tensors[f"{stem}base_layer.weight"] = tensors.pop(f"{stem}weight")
    for name, shape in (("lora_A", (128, 256)), ("lora_B", (256, 128))):
        tensors[f"{stem}{name}.default.weight"] = np.zeros(shape, np.float32)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    before = snapshot(tmp_path)
    said = call("quantize", str(model), "--recipe", recipe, "-o", str(tmp_path / "out"))
    assert_one_sentence(said, str(model), "not merged", "base_layer.weight", "merge it first")
    assert snapshot(tmp_path) == before
