"""Whole runs: errors, experts, statistics, and recipes that read back bit for bit."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qtool.tiny
from qtool.artifacts.artifact import Artifact
from qtool.calibrating import groups, placed
from qtool.calibrating.stats import SiteStats
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError
from qtool.recipe import recipe as recipes
from qtool.scheme import GroupQuant
from support.models.pipeline_models import Models, models
from support.runs import quantizing
from support.runs.quantizing import Run

__all__ = ["models"]

TINY = Path(qtool.tiny.__file__).parent


def errors(run: Run) -> np.ndarray[Any, Any]:
    return np.array([layer.relative_error for layer in run.summary.layers])


def test_errors_are_ordered_as_they_should_be(models: Models, tmp_path: Path) -> None:
    """On the inputs' own metric GPTQ loses less than rounding does, and 8 bits less than 4.

    Random weights have no outlier channels, so AWQ's scales give GPTQ nothing to gain here.
    """
    settings = [*models.settings(32, 16), "weights.symmetric=false"]
    runs = {
        recipe: quantizing.quantize(models("llama"), recipe, tmp_path / recipe, *settings)
        for recipe in ("w4g128-gptq", "w4g128-awq", "w4g128-awq-gptq", "w4g128-rtn")
    }
    runs["w8"] = quantizing.quantize(
        models("llama"), "w4g128-gptq", tmp_path / "w8", *settings, "weights.bits=8"
    )
    typical = {name: float(np.median(errors(run))) for name, run in runs.items()}
    assert all(np.isfinite(errors(run)).all() and (errors(run) > 0).all() for run in runs.values())
    assert typical["w4g128-gptq"] < 0.8 * typical["w4g128-rtn"]
    assert typical["w4g128-awq"] < typical["w4g128-rtn"]
    assert typical["w4g128-awq-gptq"] < 0.8 * typical["w4g128-rtn"]
    assert typical["w8"] < 0.1 * typical["w4g128-gptq"]


def test_rare_experts_are_rounded_to_nearest_and_counted(models: Models, tmp_path: Path) -> None:
    """Exactly those that fewer than 64 tokens reached."""
    settings = models.settings(32, 4)
    run = quantizing.quantize(models("qwen3_moe"), "w4g128-gptq", tmp_path / "a", *settings)
    plain = quantizing.quantize(
        models("qwen3_moe"), "w4g128-rtn", tmp_path / "b", *settings,
        "weights.symmetric=true", "format=gptq",
    )  # fmt: skip
    rare = {
        f"{report.name}.{expert}."
        for report in run.summary.experts
        for expert, tokens in enumerate(report.tokens)
        if tokens < 64
    }
    total = sum(len(report.tokens) for report in run.summary.experts)
    assert 0 < len(rare) < total == 16
    (note,) = [note for note in run.summary.notes if "expert" in note]
    assert f"{len(rare)} saw fewer than 64 and are rounded to nearest" in note
    for name, quant in run.quants.items():
        same = np.array_equal(quant.codes, plain.quants[name].codes)
        assert same == any(name.startswith(expert) for expert in rare), name


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3_moe"])
def test_sites_measured_apart_give_the_same(
    name: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Gram matrices are large a block's inputs are measured in turns, the last ones first."""
    settings = models.settings(16, 4)
    together = quantizing.quantize(models(name), "w4g128-gptq", tmp_path / "a", *settings)
    sizes: list[int] = []
    collect = placed.collect

    def counted(block: Any, stream: Any, sites: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(sites))
        return collect(block, stream, sites, *rest, **more)

    monkeypatch.setattr(placed, "collect", counted)
    of_all = groups.groups_of
    few = 64 * 64 * 9
    monkeypatch.setattr(groups, "groups_of", lambda sites, _: of_all(sites, few))
    apart = quantizing.quantize(models(name), "w4g128-gptq", tmp_path / "b", *settings)
    assert 1 in sizes and 2 in sizes and max(sizes) < 20
    assert together.quants.keys() == apart.quants.keys()
    for key, quant in together.quants.items():
        assert np.array_equal(quant.codes, apart.quants[key].codes), key
        assert np.array_equal(quant.scale, apart.quants[key].scale), key
    assert together.summary.experts == apart.summary.experts
    assert together.summary.notes == apart.summary.notes
    assert together.summary.layers == apart.summary.layers


def test_statistics_are_freed_as_they_are_used(models: Models, tmp_path: Path) -> None:
    alive: list[weakref.ref[Any]] = []
    left: list[int] = []
    collect, give = placed.collect, quantizing.Sink.quantized

    def watched(*given: Any, **more: Any) -> Any:
        found = collect(*given, **more)
        alive[:] = [weakref.ref(stats.gram) for stats in found.values()]
        return found

    def count(sink: Any, planned: Any, quant: GroupQuant, *rest: Any) -> None:
        left.append(sum(ref() is not None for ref in alive))
        give(sink, planned, quant, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed, "collect", watched)
        patch.setattr(quantizing.Sink, "quantized", count)
        quantizing.quantize(
            models("llama"), "w4g128-gptq", tmp_path / "out", *models.settings(), threads=1
        )
    # The costliest first: down; gate and up; q, k and v; o.
    assert left == [4, 3, 3, 2, 2, 2, 1] * 3


def test_an_input_without_statistics_is_said(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = placed.collect

    def without(block: Any, *rest: Any, **more: Any) -> Any:
        return {
            name: SiteStats(0) if "o_proj" in name else stats
            for name, stats in collect(block, *rest, **more).items()
        }

    monkeypatch.setattr(placed, "collect", without)
    run = quantizing.quantize(models("llama"), "w4g128-gptq", tmp_path / "out", *models.settings())
    assert run.summary.notes == [
        "the input of self_attn.o_proj.weight was never seen; rounded to nearest (3 times)"
    ]


def test_a_damaged_write_is_found(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading back stops a run whose disk did not keep what was written."""
    write = quantizing.Sink.close

    def close(sink: Any, *rest: Any) -> None:
        write(sink, *rest)
        with (sink.folder / "model.safetensors").open("r+b") as file:
            file.seek(-5, 2)
            byte = file.read(1)
            file.seek(-5, 2)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(quantizing.Sink, "close", close)
    with pytest.raises(FormatError, match="other bytes than were written"):
        quantizing.quantize(models("llama"), "w4g128-rtn", tmp_path / "out", *models.settings())
    assert not list(tmp_path.iterdir())


SPREAD = ("w4g128-awq", "w3g128-awq-gptq", "w4g32-gptq", "w8-rtn", "w2g64-gptq")


@pytest.mark.parametrize(
    "recipe",
    [
        name if name in SPREAD else pytest.param(name, marks=pytest.mark.slow)
        for name in recipes.shipped()
        if recipes.load(name).format not in ("gguf", "mxfp4")  # test_mxfp4_written.py
        and name != "kv-fp8"  # which leaves weights as they are
    ],
)
def test_recipes_read_back_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    sets = ["calibration.samples=8", "calibration.length=64"]
    run = quantizing.quantize(TINY, recipe, tmp_path / "out", *sets, name="tiny")
    quantizing.assert_reads_back(run)
    assert len(run.quants) == 28
    artifact = Artifact.open(run.out)
    untied = {"lm_head.weight"} if "rotated" in recipe else set()
    assert artifact.entries.keys() == Checkpoint.open(TINY).tensors.keys() | untied
    for name, value in run.weights.items():
        found = artifact.read(name)
        # A norm that took a scale was rounded to bfloat16 first, and the scale made to fit that.
        dense = found.dequantize() if isinstance(found, GroupQuant) else found
        assert np.array_equal(dense, value), name


def test_gptq_beats_rounding_on_a_trained_model(tmp_path: Path) -> None:
    sets = ["calibration.samples=8", "calibration.length=128", "weights.bits=3"]
    better = quantizing.quantize(TINY, "w4g128-gptq", tmp_path / "a", *sets)
    plain = quantizing.quantize(TINY, "w8-rtn", tmp_path / "b", "weights.bits=3",
                                "weights.group_size=128", "format=gptq",
                                "weights.symmetric=true")  # fmt: skip
    assert np.median(errors(better)) < 0.8 * np.median(errors(plain))
