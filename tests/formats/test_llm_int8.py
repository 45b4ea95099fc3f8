"""LLM.int8(): rows by their largest magnitude, written as bitsandbytes reads them; inputs whose
columns with outliers are kept apart, and a report of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from qtool.artifacts.artifact import Artifact
from qtool.calibrating import outliers
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, RecipeError
from qtool.formats import bitsandbytes
from qtool.messages.summary import OutlierReport
from qtool.methods import activations, rtn
from qtool.quality.engine_inputs import declared
from qtool.recipe import recipe as recipes
from support.runs import quantizing

NAME = "model.layers.1.mlp.gate_proj"


def test_rows_are_divided_by_their_largest() -> None:
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((9, 64)) * np.exp2(rng.integers(-9, 9, (9, 1)))).astype("f4")
    weight[3] = 0
    weight[4] *= np.float32(1e-36)
    quant = rtn.quantize(weight, None, bitsandbytes.SCHEME, rtn.Options()).quant
    most = np.abs(weight).max(1)
    assert np.array_equal(quant.scale[:, 0], np.where(most == 0, 1, np.maximum(most, 2.0**-118)))
    assert quant.codes.min() >= 1 and (quant.zero == 128).all()  # -127 .. 127
    expected = weight.astype(np.float64) / quant.scale * 127
    assert np.abs(quant.codes - 128.0 - expected).max() < 0.5001
    stored = bitsandbytes.pack("m", quant, bitsandbytes.choose([]))
    assert stored["m.weight"].dtype == np.int8 and stored["m.SCB"].shape == (9,)
    back = bitsandbytes.unpack("m", stored.__getitem__, bitsandbytes.detect(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}))  # fmt: skip
    for part in ("codes", "scale", "zero"):
        assert np.array_equal(getattr(back, part), getattr(quant, part))
    assert np.array_equal(back.dequantize(), quant.dequantize())


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_columns_with_outliers_stay(threshold: float) -> None:
    """Those of a sequence, in that sequence."""
    x = np.random.default_rng(1).standard_normal((2, 5, 32)).astype(np.float32)
    x[0, 1, 7], x[1, 4, 20] = 9.5, -6.0
    found = activations.llm_int8(threshold).apply(torch.from_numpy(x)).numpy().reshape(10, 32)
    rows = x.reshape(10, 32).astype(np.float16).astype(np.float32)
    for at, (row, numbers) in enumerate(zip(found, rows, strict=True)):
        apart = [7 if at < 5 else 20] if threshold else []
        assert np.array_equal(row[apart], numbers[apart])
        kept = np.where(np.abs(numbers) >= 6, np.float32(0), numbers) if threshold else numbers
        most = np.abs(kept).max()
        expected = np.rint(kept * (np.float32(127) / most)) * (most / np.float32(127))
        assert np.array_equal(np.delete(row, apart), np.delete(expected, apart))


def test_a_run_reports_the_columns(tmp_path: Path) -> None:
    source = quantizing.build("llama", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = [f"calibration.source={text}", "calibration.samples=4", "calibration.length=48",
            "llm_int8.threshold=2.5"]  # fmt: skip
    run = quantizing.quantize(source, "int8-llmint8", tmp_path / "out", *sets)
    quantizing.assert_reads_back(run)
    config = json.loads((run.out / "config.json").read_text())["quantization_config"]
    assert config["load_in_8bit"] and config["llm_int8_threshold"] == 2.5
    assert config["llm_int8_skip_modules"] == ["lm_head"]
    found = declared(Artifact.open(run.out)).json()
    assert found["activations"] == "llm.int8" and found["not_simulated"] == []
    record = json.loads((run.out / "qtool.json").read_text())["outliers"]
    reports = run.summary.outliers
    assert record["threshold"] == 2.5
    assert [one["name"] for one in record["inputs"]] == [one.name for one in reports]
    assert any("stay in float16" in note for note in run.summary.notes)
    # The inputs of the norms' readers reach it, and exactly these columns do.
    stats = seen(source, sets)
    assert {one.name: one.columns for one in reports} == {
        name: np.flatnonzero(largest >= 2.5).tolist()
        for name, largest in stats.items()
        if (largest >= 2.5).any()
    }
    assert len(reports) >= 3
    without = quantizing.quantize(
        source, "int8-llmint8", tmp_path / "plain", "llm_int8.outliers=false"
    )
    assert load_file(without.out / "model.safetensors").keys() == load_file(
        run.out / "model.safetensors"
    ).keys()  # fmt: skip
    assert "outliers" not in json.loads((without.out / "qtool.json").read_text())


def seen(source: Path, sets: list[str]) -> dict[str, np.ndarray]:
    """max|x| of the input of each site, as a run sees it: later blocks read quantized ones."""
    from qtool.calibrating.sites import Tracer
    from qtool.calibrating.stats import collect
    from qtool.streaming.skeleton import Skeleton
    from qtool.streaming.workers import Workers
    from qtool.texts.calibration import calibration_tokens

    recipe = recipes.load("int8-llmint8", sets)
    found = {}
    with Workers(1) as workers:
        skeleton = Skeleton.open(Checkpoint.open(source))
        stream = skeleton.embed(calibration_tokens(recipe.calibration, source).tokens)
        for index in range(skeleton.count):
            block = skeleton.block(index)
            sites = Tracer().sites(block, stream).sites
            stats = collect(block, stream, sites, ["max_abs"], workers)
            found |= {site.id: stats[site.id].max_abs for site in sites}
            for site in sites:
                for name in site.names:
                    view = block.weights[name]
                    quant = rtn.quantize(view.numpy(), None, recipe.scheme, rtn.Options()).quant
                    view.copy_(torch.from_numpy(quant.dequantize()))
            skeleton.advance(block, stream, workers)
    return found


def test_what_is_refused() -> None:
    for sets, said in (
        (["method=gptq"], "bitsandbytes divides each row"),
        (["rtn.clip=true"], "bitsandbytes divides each row"),
        (["weights.bits=4"], "LLM.int8() has 8 bits, not 4; for fewer take the recipe w4g128-awq"),
        (["weights.bits=3"], "LLM.int8() has 8 bits, not 3; for fewer take the recipe w3g128-gptq"),
        (["llm_int8.threshold=-1"], "llm_int8.threshold: input should be greater"),
    ):
        with pytest.raises(RecipeError) as caught:
            recipes.load("int8-llmint8", sets)
        assert said in str(caught.value)
    scheme = recipes.load("int8-llmint8", ["weights.group_size=64"]).scheme
    assert "one scale a row" in str(bitsandbytes.supports(scheme, (8, 64), bitsandbytes.choose([])))
    with pytest.raises(FormatError, match='llm_int8_threshold is "six"'):
        bitsandbytes.threshold_of({"llm_int8_threshold": "six"})
    assert "no column is an outlier" in outliers.note([], 6.0)
    assert "3 columns of 2 inputs" in outliers.note(
        [OutlierReport("a", [1], 7.0), OutlierReport("b", [2, 3], 8.0)], 6.0
    )
