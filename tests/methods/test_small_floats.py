"""Rounding to FP8 and FP4, held to definitions in a few lines; artifacts made of it, end to end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qtool.tiny
from qtool import small_floats
from qtool.artifacts.artifact import Artifact
from qtool.dequantize import dequantize
from qtool.float_codes import LARGEST, TABLES
from qtool.methods import rtn
from qtool.recipe.recipe import load
from qtool.runs.each_tensor import frobenius_error
from qtool.scheme import GroupQuant, Scheme
from support.formats.nearest_floats import FP8, MXFP4, MXFP8, NVFP4, nearest, tops, weights
from support.runs import quantizing

TINY = Path(qtool.tiny.__file__).parent


@pytest.mark.parametrize("kind", FP8)
def test_fp8_scales_and_codes(kind: str) -> None:
    scheme, weight = FP8[kind], weights()
    quant = small_floats.quantize(weight, scheme)
    assert quant.scale.shape == scheme.grid(weight.shape) and (quant.scale > 0).all()
    grid = tops(weight, scheme)
    scale = quant.row_scale()[:, quant.group_index()].astype(np.float64)
    wanted = np.where(grid == 0, 1, grid / LARGEST[scheme.book])
    precision = {"float32": 2**-23, "float16": 2**-11, "bfloat16": 2**-8}[scheme.scale_dtype]
    if kind == "group":  # float16 has no such small numbers as the tiny row needs
        wanted = np.clip(wanted, 2.0**-24, None)
        precision = 0.5
    assert (np.abs(scale - wanted) <= precision * wanted).all()
    values = TABLES[scheme.book][quant.codes].astype(np.float64)
    assert np.isfinite(values).all()
    ratio = (weight / scale.astype(np.float32)).astype(np.float64)
    assert np.array_equal(np.abs(values - ratio), np.abs(nearest(ratio, scheme.book) - ratio))
    assert (quant.dequantize()[3] == 0).all() and not quant.zero.any()


def test_stored_scales_are_what_codes_are_of() -> None:
    """A bfloat16 scale that was rounded down: the largest weight becomes 448 all the same."""
    weight = np.zeros((1, 32), np.float32)
    weight[0, 0] = 448 * (1 + 2**-9)
    quant = small_floats.quantize(weight, FP8["channel"])
    assert quant.scale.tolist() == [[1.0]] and quant.dequantize()[0, 0] == 448


def test_two_levels() -> None:
    weight = weights()
    quant = small_floats.quantize(weight, NVFP4)
    assert quant.outer == np.float32(448 * 6) / np.abs(weight).max()
    grid = tops(weight, NVFP4)[:, ::16] / 6 * quant.outer
    assert np.array_equal(
        np.abs(quant.scale - grid)[grid > 2**-9],
        np.abs(nearest(grid, "e4m3") - grid)[grid > 2**-9],
    )
    assert quant.scale.min() == 2**-9  # the tiny row; never zero
    step = quant.row_scale()[:, quant.group_index()]
    values = TABLES["e2m1"][quant.codes].astype(np.float64)
    ratio = (weight / step).astype(np.float64)
    assert np.array_equal(np.abs(values - ratio), np.abs(nearest(ratio, "e2m1") - ratio))
    shared = small_floats.quantize(weight, NVFP4, 1e6)
    assert shared.outer == np.float32(448 * 6) / np.float32(1e6)
    assert small_floats.quantize(np.zeros((2, 32), np.float32), NVFP4).outer == 1


@pytest.mark.parametrize("scheme", [MXFP4, MXFP8])
def test_the_better_of_two_powers(scheme: Scheme) -> None:
    weight = weights()
    quant = small_floats.quantize(weight, scheme)
    grid = tops(weight, scheme)[:, ::32]
    low = np.exp2(np.floor(np.log2(np.where(grid == 0, 1, grid))) - (2 if scheme.bits == 4 else 8))
    low[grid == 0] = 1
    both = []
    for scale in (low, low * 2):
        step = np.repeat(scale, 32, axis=1)
        lost = nearest(
            np.clip(weight / step, -LARGEST[scheme.book], LARGEST[scheme.book]), scheme.book
        )
        both.append(((lost * step - weight) ** 2).reshape(*grid.shape, 32).sum(-1))
    assert np.array_equal(quant.scale, np.where(both[1] < both[0], low * 2, low))
    assert (both[1] < both[0]).any() and (both[1] > both[0]).any()
    least = np.minimum(*both)
    found = ((quant.dequantize() - weight).astype(np.float64) ** 2).reshape(*grid.shape, 32).sum(-1)
    np.testing.assert_allclose(found, least, rtol=1e-5)


def test_one_scale_for_fused_matrices() -> None:
    weight = weights()
    large = float(np.abs(weight).max()) * 4
    quant = small_floats.quantize(weight, FP8["tensor"], large)
    assert quant.scale.tolist() == [[np.float32(large) / np.float32(448)]]
    plain = rtn.quantize(weight, None, FP8["tensor"], rtn.Options(largest=large)).quant
    assert np.array_equal(plain.codes, quant.codes)


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        ("w8a16-ct", 0.016),
        ("w8a8-dynamic", 0.016),
        ("fp8-dynamic", 0.027),
        ("fp8-block", 0.028),
        ("fp8-block-hf", 0.028),
        ("nvfp4", 0.10),
        ("mxfp4", 0.135),
    ],
)
def test_recipes_end_to_end(tmp_path: Path, recipe: str, error: float) -> None:
    """What was in memory reads back; errors are those of the numbers; any threads, one result."""
    run = quantizing.quantize(TINY, recipe, tmp_path / "a")
    quantizing.assert_reads_back(run)
    assert len(run.quants) == 28
    source = Artifact.open(TINY)
    artifact = Artifact.open(run.out)
    for name, quant in run.quants.items():
        found = artifact.read(name)
        assert isinstance(found, GroupQuant) and found.outer == quant.outer
        assert np.array_equal(dequantize(found), quant.dequantize())
        weight = source.read(name)
        assert isinstance(weight, np.ndarray)
        assert 0.25 * error < frobenius_error(weight, dequantize(quant)) < error, name
    other = quantizing.quantize(TINY, recipe, tmp_path / "b", threads=1)
    assert quantizing.files(run.out) == quantizing.files(other.out)
    config = json.loads((run.out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] in ("compressed-tensors", "fp8")
    if recipe == "fp8-block-hf":
        assert config["modules_to_not_convert"] == ["lm_head"]
    else:
        assert config["ignore"] == ["lm_head"]
        group = config["config_groups"]["group_0"]
        quantized = recipe in ("w8a8-dynamic", "fp8-dynamic", "fp8-block")
        assert (group["input_activations"] is not None) == quantized


def test_fused_matrices_share_in_the_file(tmp_path: Path) -> None:
    run = quantizing.quantize(TINY, "nvfp4", tmp_path / "a")
    source = Artifact.open(TINY)
    for block in range(4):
        for where, parts in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            names = [f"model.layers.{block}.{where}.{p}_proj.weight" for p in parts]
            top = max(float(np.abs(source.read(name)).max()) for name in names)
            for name in names:
                assert run.quants[name].outer == np.float32(448 * 6) / np.float32(top)
        alone = f"model.layers.{block}.self_attn.o_proj.weight"
        top = float(np.abs(source.read(alone)).max())
        assert run.quants[alone].outer == np.float32(448 * 6) / np.float32(top)


@pytest.mark.parametrize("recipe", ["fp8-static", "w8a8-static"])
def test_static_scales_are_the_largest_inputs(tmp_path: Path, recipe: str) -> None:
    """Of the first block exactly what transformers feeds it; later blocks see quantized ones."""
    import torch
    from transformers import AutoModelForCausalLM

    from qtool.texts.calibration import calibration_tokens

    few = ("calibration.samples=4", "calibration.length=64")
    run = quantizing.quantize(TINY, recipe, tmp_path / "a", *few)
    quantizing.assert_reads_back(run)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    largest: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(watch(name))
    tokens = calibration_tokens(load(recipe, few).calibration, TINY).tokens
    with torch.no_grad():
        model(torch.from_numpy(tokens))
    checkpoint = Artifact.open(run.out).checkpoint
    scales = {n: checkpoint.array(n) for n in checkpoint.tensors if n.endswith(".input_scale")}
    assert scales.keys() == {f"{name}.input_scale" for name in largest}
    reach = 448 if recipe == "fp8-static" else 127
    for name, top in largest.items():
        scale = float(scales[f"{name}.input_scale"][0])
        less, more = (1e-5, 2**-7) if ".layers.0." in name else (0.2, 0.2)
        assert top / reach * (1 - less) <= scale <= top / reach * (1 + more), name
    config = json.loads((run.out / "config.json").read_text())["quantization_config"]
    inputs = config["config_groups"]["group_0"]["input_activations"]
    assert (inputs["dynamic"], inputs["strategy"]) == (False, "tensor")


def test_experts_share_one_by_one() -> None:
    from qtool.planning.shared_scales import shard_key

    first = "model.layers.0.block_sparse_moe.experts.1"
    assert shard_key(f"{first}.w1") == shard_key(f"{first}.w3") != shard_key(f"{first}.w2")
    assert shard_key(f"{first}.w1") != shard_key(f"{first[:-1]}2.w1")
    assert shard_key("a.k_proj") == shard_key("a.q_proj") != shard_key("b.q_proj")
