"""Recipes that tune, and whole runs of them."""

import argparse
import inspect
from pathlib import Path

import numpy as np
import pytest

import qtool
from qtool.artifacts.artifact import Artifact
from qtool.blockwise.originals import tuned_note
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import RecipeError, UnsupportedError
from qtool.matrix.cells import cells
from qtool.messages.summary import TunedReport
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load, parse
from qtool.verification.run import verify_artifact
from support.runs import quantizing

HEAD = "weights: {bits: 4, group_size: 32, symmetric: false}\n"


@pytest.mark.parametrize("format_", ["awq", "gptq", "compressed-tensors"])
@pytest.mark.parametrize(
    "method",
    ["[rtn, tune]", "[gptq, tune]", "[awq, tune]", "[awq, rtn, tune]", "[awq, gptq, tune]"],
)
def test_what_is_tuned(method: str, format_: str) -> None:
    recipe = parse(f"method: {method}\nformat: {format_}\n{HEAD}", "a.yaml", "a")
    plain = parse(
        f"method: {method.replace(', tune', '')}\nformat: {format_}\n{HEAD}", "a.yaml", "a"
    )
    assert recipe.tunes and not plain.tunes and recipe.calibrates
    assert (recipe.rounding, recipe.transform_chain) == (plain.rounding, plain.transform_chain)
    assert recipe.clips == plain.clips and not recipe.idle_options


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method: tune\nformat: gptq\n" + HEAD, "no order that exists"),
        ("method: [tune, gptq]\nformat: gptq\n" + HEAD, "no order that exists"),
        ("method: [none, tune]\nformat: dense\n", "no order that exists"),
        (
            "method: [gptq, tune]\nformat: bitsandbytes\n" + HEAD,
            "tune moves the scales of integers",
        ),
        (
            "method: [rtn, tune]\nformat: compressed-tensors\n"
            "weights: {type: nvfp4, bits: 4, group_size: 16, symmetric: true}\n",
            "tune moves the scales of integers",
        ),
        (
            "method: [gptq, tune]\nformat: compressed-tensors\n"
            "weights: {bits: 8, group_size: -1, symmetric: true}\n"
            "activations: {bits: 8, type: int}\n",
            "tune is for weights alone",
        ),
    ],
)
def test_what_is_not(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=rf"^a\.yaml:1: method: .*{said}"):
        parse(text, "a.yaml", "a")


def test_idle_without_the_method() -> None:
    assert load("w4g128-gptq", ["tune.steps=5"]).idle_options == ["tune.steps"]


def test_statistics_of_a_file_do_not_serve(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    (tmp_path / "stats").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"holds no text, which recipe .* needs to tune"):
        quantizing.quantize(model, "w4g128-awq-gptq-tune", tmp_path / "out",
                            stats=tmp_path / "stats")  # fmt: skip


def test_a_matrix_calibrates_it_by_itself(tmp_path: Path) -> None:
    names = ["w4g128-awq-gptq", "w4g128-awq-gptq-tune", "w3g128-awq-gptq-tune"]
    found = cells(names, tmp_path, [], share=True, error_aware=False)
    assert [cell.calibrated for cell in found] == ["shared", "itself", "itself"]


def sets(text: Path) -> list[str]:
    return [
        "weights.group_size=32",
        f"calibration.source={text}",
        "calibration.samples=12",
        "calibration.length=256",
        "awq.grid=4",
    ]


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "phi3"])
def test_a_run_differs_from_the_plain_one_in_scales_alone(name: str, tmp_path: Path) -> None:
    """In its first block; the codes of later ones are fitted to what comes out of it."""
    model = quantizing.build(name, tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    plain = quantizing.quantize(model, "w4g128-awq-gptq", tmp_path / "plain", *sets(text))
    tuned = quantizing.quantize(
        model, "w4g128-awq-gptq-tune", tmp_path / "tuned", *sets(text), "tune.steps=4"
    )
    first = {key: quant for key, quant in plain.quants.items() if ".layers.0." in key}
    assert first
    moved = 0
    for key, quant in first.items():
        other = tuned.quants[key]
        assert np.array_equal(quant.codes, other.codes) and np.array_equal(quant.zero, other.zero)
        moved += not np.array_equal(quant.scale, other.scale)
    assert moved > len(first) // 2
    for key, weight in tuned.weights.items():
        if key not in tuned.quants:
            continue
        assert np.array_equal(weight, tuned.quants[key].dequantize()), key
    assert any("blocks were tuned" in note for note in tuned.summary.notes)
    assert verify_artifact(tuned.out, against=model).ok
    stored = dict(Artifact.open(tuned.out).dequantized())
    assert all(np.array_equal(stored[n], q.dequantize()) for n, q in tuned.quants.items())


def test_a_block_without_anything_to_tune(tmp_path: Path) -> None:
    """An override leaves it dense."""
    model = quantizing.build("llama", tmp_path / "model")
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "method: [rtn, tune]\nformat: gptq\nweights: {bits: 4, group_size: 32, symmetric: true}\n"
        'tune: {steps: 3}\noverrides:\n  - {match: "model.layers.0.*", dense: true}\n'
    )
    text = quantizing.text_file(tmp_path / "text.txt")
    made = quantizing.quantize(
        model, str(recipe), tmp_path / "out", f"calibration.source={text}",
        "calibration.samples=2", "calibration.length=16",
    )  # fmt: skip
    (note,) = (note for note in made.summary.notes if "were tuned" in note)
    blocks = Checkpoint.open(model).config["num_hidden_layers"]
    assert f" of {blocks - 1} blocks were tuned" in note
    assert verify_artifact(made.out, against=model).ok


def test_routed_experts_are_refused(tmp_path: Path) -> None:
    model = quantizing.build("qwen3_moe", tmp_path / "model")
    with pytest.raises(
        UnsupportedError, match=r"routed experts \(model\.layers\.0\.mlp\.experts\.0"
    ):
        quantizing.quantize(
            model, "w4g128-awq-gptq-tune", tmp_path / "out", "weights.group_size=32"
        )


@pytest.mark.parametrize(
    ("recipe", "plain", "tuned"),
    [
        pytest.param("q3_k_m", "method=gptq", "method=[gptq, tune]", marks=pytest.mark.slow),
        pytest.param("w3g128-gptq", "method=gptq", "method=[gptq, tune]", marks=pytest.mark.slow),
    ],
)
def test_what_is_tuned_is_nearer(recipe: str, plain: str, tuned: str, tmp_path: Path) -> None:
    """On text that took no part divergence from the original falls."""
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 2)
    text = tmp_path / "text.txt"
    text.write_text(inspect.getsource(argparse), encoding="utf-8")
    found = []
    for method in ([plain], [tuned, "tune.steps=15", "tune.rate=0.003"]):
        out = tmp_path / f"{len(found)}{'.gguf' if recipe.startswith('q') else ''}"
        chosen = [*method, "calibration.samples=24", "calibration.length=256"]
        qtool.quantize(model, recipe, out, changes=chosen, threads=2)
        measured = qtool.evaluate(out, text, against=model, windows=8, length=256, threads=2)
        found.append(measured.found["kld"]["mean"])
    assert found[1] < 0.98 * found[0]


def test_the_note() -> None:
    reports = [TunedReport(0, 1.0, 0.5), TunedReport(1, 0.2, 0.2), TunedReport(2, 1.0, 0.9)]
    (said,) = tuned_note(reports)
    assert said.startswith("scales of 2 of 3 blocks were tuned; ")
    assert "median 0.900, least 0.500" in said
    assert tuned_note([]) == []


def test_the_plan_knows_what_it_takes(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(model)
    many = ["weights.group_size=32", "calibration.samples=512", "gptq.yaqa=0"]
    plain = make_plan(load("w4g128-awq-gptq", many), checkpoint, threads=2)
    tuned = make_plan(load("w4g128-awq-gptq-tune", many), checkpoint, threads=2)
    longer = make_plan(
        load("w4g128-awq-gptq-tune", [*many, "tune.steps=600"]), checkpoint, threads=2
    )
    assert tuned.disk_bytes == 2 * plain.disk_bytes > 0
    assert tuned.peak_rss_bytes > plain.peak_rss_bytes
    assert plain.seconds < tuned.seconds < longer.seconds
    assert tuned.layout == plain.layout
