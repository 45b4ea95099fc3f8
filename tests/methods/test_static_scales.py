"""Scales of inputs that are stored, and scales of a whole matrix: by hand, and in whole runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from qtool import grid
from qtool.artifacts.artifact import Artifact
from qtool.calibrating import ranges
from qtool.errors import RecipeError, UnsupportedError
from qtool.methods import activations
from qtool.quality.engine_inputs import activations as of_weights
from qtool.quality.weights import open_weights
from qtool.recipe import recipe
from support.runs.quantizing import assert_reads_back, build, quantize, text_file

STATIC = ["activations.dynamic=false", "weights.group_size=-1"]


def test_percentiles_are_those_of_the_numbers() -> None:
    x = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    histogram = ranges.counts(torch.from_numpy(x)).numpy()
    assert histogram.sum() == len(x)
    for percent in (50.5, 90, 99.9):
        exact = np.quantile(np.abs(x), percent / 100, method="inverted_cdf")
        assert exact <= ranges.percentile(histogram, percent) <= exact * (1 + 2**-7)
    zeros = ranges.counts(torch.zeros(10)).numpy()
    assert zeros[0] == 10 and ranges.percentile(zeros, 99) < 1e-38


@pytest.mark.parametrize("kind", ["int", "float"])
def test_least_squares_finds_the_best_limit(kind: str) -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal(20_000).astype(np.float32)
    x[:4] = 40  # a few numbers that are not worth their range

    def rounded(limit: float, values: torch.Tensor) -> torch.Tensor:
        if kind == "int":
            return activations.stored_integers(8, limit / 127, 0.0).apply(values)
        return activations.stored_fp8(limit / 448).apply(values)

    def error(limit: float) -> float:
        values = torch.from_numpy(x)
        return float((rounded(limit, values) - values).double().square().sum())

    histogram = ranges.counts(torch.from_numpy(x)).numpy()
    found = ranges.least_squares(histogram, 40.0, rounded)
    errors = {k: error(40 * k / 100) for k in range(21, 101)}
    assert error(found) <= 1.02 * min(errors.values())
    if kind == "int":
        assert found < 40  # floats lose nothing by a wide range


def scales(folder: Path) -> dict[str, float]:
    state = load_file(folder / "model.safetensors")
    return {k: float(v[0]) for k, v in state.items() if k.endswith("input_scale")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("static")
    model = build("llama", root / "m")
    text = text_file(root / "text.txt", 6000)
    given = [f"calibration.source={text}", "calibration.samples=4", "calibration.length=32"]
    made = {}
    for name, chosen, sets in (
        ("minmax", "w8a8-static", ()),
        ("all", "w8a8-static", ("observer=percentile", "percentile=100")),
        ("percentile", "w8a8-static", ("observer=percentile", "percentile=99")),
        ("mse", "w8a8-static", ("observer=mse",)),
        ("smoothed", "w8a8-smoothquant-static", ()),
        ("smoothed-percentile", "w8a8-smoothquant-static", ("observer=percentile",)),
    ):
        more = [f"activations.{item}" for item in sets]
        made[name] = quantize(model, chosen, root / name, *given, *more).out
    made["model"], made["text"] = model, text
    return made


def test_observers(runs: dict[str, Path]) -> None:
    found = {name: scales(path) for name, path in runs.items() if path.is_dir() and name != "model"}
    plain = found["minmax"]
    assert len(plain) == 21
    for name, scale in plain.items():
        # Later blocks see what earlier ones make of their codes.
        near = 1e-6 if ".layers.0." in name else 0.05
        assert found["all"][name] == pytest.approx(scale, rel=near)
        assert found["percentile"][name] < 0.95 * scale
        assert found["mse"][name] <= scale * 1.05
    smoothed = found["smoothed"]
    first = "model.layers.0.self_attn.q_proj.input_scale"
    # The histogram is one of smoothed inputs, whose range is another one.
    assert smoothed[first] != pytest.approx(plain[first], rel=0.05)
    for name, scale in smoothed.items():
        assert 0.3 * scale < found["smoothed-percentile"][name] <= 1.05 * scale


def test_one_scale_for_a_matrix(runs: dict[str, Path], tmp_path: Path) -> None:
    """SmoothQuant's O2 in full: tensor, and as inputs come."""
    run = quantize(runs["model"], "w8a8-dynamic", tmp_path / "o2", "weights.rows=-1",
                   "activations.scale=tensor")  # fmt: skip
    assert_reads_back(run)
    config = json.loads((run.out / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == group["input_activations"]["strategy"] == "tensor"
    assert group["input_activations"]["dynamic"] is True
    assert any(
        "with dynamic 8-bit inputs per tensor" in warning for warning in run.summary.warnings
    )
    artifact = Artifact.open(run.out)
    source = load_file(runs["model"] / "model.safetensors")
    for name, entry in artifact.entries.items():
        if entry.scheme is None:
            continue
        quant = artifact.read(name)
        step = np.abs(source[name]).max() / grid.reach(8)
        assert quant.scale.shape == (1, 1) and float(quant.scale[0, 0]) == pytest.approx(step, 1e-3)
        assert np.abs(quant.dequantize() - source[name]).max() <= 0.55 * step  # float16 rounds it


def test_groups_of_weights_and_inputs_by_token(runs: dict[str, Path], tmp_path: Path) -> None:
    """ZeroQuant's scheme, packed as engines want it."""
    run = quantize(runs["model"], "w8a8-dynamic", tmp_path / "zero", "weights.group_size=32")
    assert_reads_back(run)
    config = json.loads((run.out / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert config["format"] == "pack-quantized"
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("group", 32)
    assert group["input_activations"]["strategy"] == "token"
    with open_weights(run.out) as weights:
        rounded = of_weights(weights, "plain")
    assert {rounding.name for rounding in rounded.of_matrix.values()} == {"int8"}
    assert any("humming" in warning for warning in run.summary.warnings)


@pytest.mark.parametrize(
    ("name", "item", "sentence"),
    [
        ("w8a8-dynamic", "activations.observer=mse", "observer is for stored scales"),
        ("w8a8-static", "activations.percentile=20", "greater than 50"),
        ("w8a16-ct", "weights.rows=-1", "goes with activations"),
        ("w8a8-dynamic", "weights={bits: 8, group_size: 64, symmetric: true, rows: -1}",
         "int has one scale a row"),
        ("w8a8-dynamic", "weights={bits: 8, group_size: -1, symmetric: true, rows: 4}",
         "int has one scale a row"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(name: str, item: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        recipe.load(name, [item])


def test_no_histograms_in_files(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="holds no histograms"):
        quantize(runs["model"], "w8a8-static", tmp_path / "out", "activations.observer=mse",
                 stats=runs["text"])  # fmt: skip


def test_inputs_that_come_together_share_a_scale() -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32))
    for number in range(2):
        scale = x[number].abs().max() / 127
        expected = (x[number] / scale).round() * scale
        assert torch.allclose(activations.whole_together(8).apply(x)[number], expected)
    fp8 = activations.fp8_together().apply(x)
    assert float((fp8 - x).abs().max()) <= float(x.abs().max()) / 16
