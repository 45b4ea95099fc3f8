"""`qtool convert` between formats of checkpoints: exact and certified."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qtool.artifacts.artifact import Artifact
from qtool.converting import pieces
from qtool.errors import UnsupportedError
from qtool.hub import resolve
from support.converting.converting import (
    MATRICES,
    TENSORS,
    converted,
    first_block,
    numbers,
    place,
    run,
    stored,
    weights,
)
from support.converting.rounded_artifacts import edit, made, relabel
from support.runs import quantizing

__all__ = ["made"]

AWQ = ("awq", "awq-gemv", "awq-gemv-fast", "awq-llm")
ASYMMETRIC = (*AWQ, "gptq-v2", "compressed-tensors")
EVERY = (*ASYMMETRIC, "gptq", "gguf")


@pytest.fixture(scope="module")
def layouts(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The symmetric artifact in every format."""
    root = tmp_path_factory.mktemp("layouts")
    return {to: run(made["symmetric"], to, root / place(to)) for to in EVERY}


@pytest.mark.parametrize(
    ("have", "to"), [(a, b) for a in EVERY for b in EVERY if (a, b) != ("gguf", "gguf")]
)
def test_every_pair_gives_the_same_files(
    layouts: dict[str, Path], made: dict[str, Path], have: str, to: str, tmp_path: Path
) -> None:
    """What a format becomes does not depend on what it was, so each way back is exact, too."""
    assert stored(run(layouts[have], to, tmp_path / place(to))) == stored(layouts[to])
    if to == "awq":
        assert stored(layouts[to]) == stored(made["symmetric"])


@pytest.mark.parametrize(
    ("case", "to", "back"),
    [("asymmetric", to, "awq") for to in ASYMMETRIC]
    + [("channel", to, "awq") for to in ("gptq", "awq-gemv-fast", "compressed-tensors")]
    + [(case, to, "gptq") for case in ("eight", "three") for to in ("gptq-v2", "ct")],
)
def test_there_and_back_gives_the_same_files(
    made: dict[str, Path], case: str, to: str, back: str, tmp_path: Path
) -> None:
    there = run(made[case], to, tmp_path / "there")
    assert weights(run(there, back, tmp_path / "back")) == weights(made[case])
    source = numbers(made[case])
    found = numbers(there)
    assert found.keys() == source.keys()
    for name, value in source.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_settings_of_gptq_are_in_the_recipe(made: dict[str, Path], tmp_path: Path) -> None:
    """Every artifact carries it, and the config tells them again on the way back."""
    source = relabel(made["eight"], tmp_path / "source", "gptq")
    options = {"damp_percent": 0.05, "static_groups": False, "mse": True}
    record = json.loads((source / "qtool.json").read_text())
    record["recipe"] |= {"method": "gptq", "gptq": options}
    (source / "qtool.json").write_text(json.dumps(record))
    for to in ("compressed-tensors", "gptq-v2"):
        back = run(run(source, to, tmp_path / to), "gptq", tmp_path / f"{to}-back")
        config = json.loads((back / "quantize_config.json").read_text())
        assert {key: config["meta"][key] for key in options} == options
        assert weights(back) == weights(source)


@pytest.mark.slow
def test_configs_come_back_too(tmp_path: Path) -> None:
    """What they say of GPTQ's settings is in the recipe, which every artifact carries."""
    model = first_block(tmp_path / "model")
    sets = ("calibration.samples=4", "calibration.length=64")
    source = quantizing.quantize(model, "w4g64-gptq", tmp_path / "source", *sets).out
    for to in ("compressed-tensors", "awq", "gptq-v2"):
        back = run(run(source, to, tmp_path / to), "gptq", tmp_path / f"{to}-back")
        for name in ("model.safetensors", "config.json", "quantize_config.json"):
            assert (back / name).read_bytes() == (source / name).read_bytes(), name


def test_shards_come_back_as_they_were(tmp_path: Path) -> None:
    """Order in the files is that of the plan, found again in each file's regions by width."""
    quantizing.quantize(
        resolve("tiny"), "w4g128-rtn", tmp_path / "source", "weights.symmetric=true",
        max_shard_bytes=400_000,
    )  # fmt: skip
    assert len(weights(tmp_path / "source")) > 4
    run(tmp_path / "source", "gptq", tmp_path / "there", max_shard_bytes=300_000)
    run(tmp_path / "there", "awq", tmp_path / "back", max_shard_bytes=400_000)
    assert weights(tmp_path / "back") == weights(tmp_path / "source")


def test_certificate_config_and_side_files(made: dict[str, Path], tmp_path: Path) -> None:
    out = run(made["symmetric"], "gptq", tmp_path / "out")
    record = json.loads((out / "qtool.json").read_text())
    before = json.loads((made["symmetric"] / "qtool.json").read_text())
    assert record["recipe"] == before["recipe"] and record["source"] == before["source"]
    assert record["layers"] == before["layers"] and len(record["layers"]) == MATRICES
    (said,) = record["conversions"]
    assert said["exact"] is True and said["rounded"] == []
    assert said["compared"] == TENSORS and said["matrices"] == MATRICES
    assert said["from"] == {
        "format": "awq",
        "layout": "gemm",
        "digest": f"sha256:{Artifact.open(made['symmetric']).checkpoint.digest()}",
        "group_size": 32,
        "scale_dtype": "float16",
        "dtype": "bfloat16",
    }
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config == json.loads((out / "quantize_config.json").read_text())
    assert config["quant_method"] == "gptq" and config["desc_act"] is False
    assert config["sym"] is True and config["group_size"] == 32
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (resolve("tiny") / name).read_bytes()
    assert "base_model: org/tiny" in (card := (out / "README.md").read_text())
    assert '"layers"' not in card
    assert f"all {TENSORS} tensors read back and compared: the same numbers" in card
    again = run(out, "awq", tmp_path / "again")
    assert len(json.loads((again / "qtool.json").read_text())["conversions"]) == 2


def test_widths_and_groups_that_differ(tmp_path: Path) -> None:
    """GPTQ and compressed-tensors name the modules; AWQ has one width for all."""
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(MIXED)
    model = first_block(tmp_path / "model")
    source = quantizing.quantize(model, str(recipe), tmp_path / "source").out
    for to in ("gptq-v2", "compressed-tensors"):
        there = run(source, to, tmp_path / to)
        assert weights(run(there, "gptq", tmp_path / f"{to}-back")) == weights(source)
    with pytest.raises(UnsupportedError, match="awq holds 4 bits only, not 8"):
        run(source, "awq", tmp_path / "awq")
    file = run(source, "gguf", tmp_path / "mixed.gguf")
    kinds = {name: kind for name, (kind, _) in stored(file).items()}
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0" and kinds["blk.0.ffn_up.weight"] == "Q4_0"
    found = numbers(run(file, "gptq", tmp_path / "from-gguf"))
    for name, value in numbers(source).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_scales_come_back_in_their_own_type(made: dict[str, Path], tmp_path: Path) -> None:
    """Others write bfloat16 into compressed-tensors; float16 holds these, and they come back."""

    def narrow(tensors: dict[str, Any]) -> None:
        for name, value in tensors.items():
            if name.endswith("weight_scale"):
                tensors[name] = value.bfloat16()
                assert (tensors[name] == value).all()

    source = edit(run(made["symmetric"], "ct", tmp_path / "source"), narrow)
    source = run(source, "compressed-tensors", tmp_path / "in-our-order")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    assert Artifact.open(source).checkpoint.tensors[name].dtype == "BF16"
    for to in ("gptq", "awq", "gguf"):
        there = run(source, to, tmp_path / place(to))
        back = run(there, "compressed-tensors", tmp_path / f"{to}-back")
        assert weights(back) == weights(source), to


@pytest.mark.parametrize("to", ["awq", "gguf", "hf"])
def test_scales_of_the_cache_are_dropped_and_said(
    to: str, layouts: dict[str, Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(layouts["compressed-tensors"], source)
    names = [f"model.layers.0.self_attn.{part}_scale" for part in "kv"]
    edit(source, lambda tensors: tensors.update({name: torch.ones(1) for name in names}))
    made = converted(source, to, tmp_path / place(to), dtype="float32")
    assert sorted(name for name, _ in made.certificate.dropped) == names
    assert "2 scales of the KV cache are dropped" in made.warnings[0] and made.certificate.exact


def test_small_floats_are_dequantized_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_AT_ONCE", 100 * 256)  # rows that are no whole blocks
    model = first_block(tmp_path / "model")
    for recipe in ("fp8-dynamic", "fp8-block-hf", "nvfp4"):
        source = quantizing.quantize(model, recipe, tmp_path / recipe).out
        with pytest.raises(UnsupportedError, match=r"fp[48].*not as integers.*--to hf"):
            run(source, "awq", tmp_path / "out")
        made = converted(source, "hf", tmp_path / f"{recipe}-hf", dtype="float32")
        assert made.certificate.exact and sum(made.dequantized.values()) == MATRICES
        activations = any("quantized activations" in warning for warning in made.warnings)
        assert activations == (recipe != "nvfp4")  # engines run the other two with FP8 inputs
        found = numbers(tmp_path / f"{recipe}-hf")
        for name, value in numbers(source).items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


MIXED = """\
# For a test: wide codes in some layers.
method: rtn
format: gptq
weights: {bits: 4, group_size: 128, symmetric: true}
overrides:
  - {match: "*.down_proj", weights: {bits: 8, group_size: 64}}
"""


@pytest.mark.parametrize("dtype", [None, "float16", "float32"])
def test_dequantized(made: dict[str, Path], dtype: str | None, tmp_path: Path) -> None:
    out = run(made["asymmetric"], "hf", tmp_path / "out", dtype=dtype)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and not (out / "quant_config.json").exists()
    assert config["dtype"] == (dtype or "bfloat16")
    record = json.loads((out / "qtool.json").read_text())
    assert record["made_from"]["format"] == "awq" and "layers" not in record
    (said,) = record["conversions"]
    before, after = numbers(made["asymmetric"]), numbers(out)
    assert before.keys() == after.keys()
    rounded = {one["name"]: one["relative_error"] for one in said["rounded"]}
    assert bool(rounded) == (dtype != "float32") and said["exact"] == (not rounded)
    for name, value in before.items():
        error = np.linalg.norm(value - after[name]) / np.linalg.norm(value)
        assert rounded.get(name, 0.0) == pytest.approx(error, rel=1e-4), name
        assert (name in rounded) == (error > 0), name
        assert error <= {"float16": 2**-11, "float32": 0}.get(dtype or "", 2**-8)


def test_wide_dense_tensors_keep_their_place(made: dict[str, Path], tmp_path: Path) -> None:
    """float32 vectors stand among int32 words; in a layout of 16-bit words they stand alone."""
    model = run(made["asymmetric"], "hf", tmp_path / "model", dtype="float32")
    source = quantizing.quantize(model, "w4g128-rtn", tmp_path / "source").out
    fast = run(source, "awq-gemv-fast", tmp_path / "fast")
    assert weights(run(fast, "awq", tmp_path / "again")) == weights(source)
