"""Matrices that a checkpoint keeps in one tensor are what they are in several."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantizing
import torch
from arch_models import VOCABULARY
from cuda_device import device, emulator
from quantizing import Run
from safetensors.torch import load_file, save_file
from test_fit_slopes import measured
from test_generate import check
from test_row_feedback import measured as ends_of
from transformers import conversion_mapping, core_model_loading

from qtool.calibrating.placed import Passage, placed_block
from qtool.calibrating.row_feedback import Feedback
from qtool.calibrating.sites import Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.generating.generate import generate
from qtool.runs.progress import Progress
from qtool.streaming.device import Device
from qtool.streaming.joined_rows import Joined, RowsOf
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers

__all__ = ["device", "emulator"]

ROWS = {"q": (0, 64), "k": (64, 96), "v": (96, 128)}
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sarvam's small mixture of experts, and the same with q, k and v in tensors of their own."""
    folder = tmp_path_factory.mktemp("models")
    one = quantizing.build("sarvam_moe", folder / "one")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(one / "model.safetensors").items():
        for own, rows in parts(name).items() if "query_key_value" in name else {name: None}.items():
            tensors[own] = tensor if rows is None else tensor[slice(*rows)].contiguous()
    apart = folder / "apart"
    apart.mkdir()
    save_file(tensors, apart / "model.safetensors")
    (apart / "config.json").write_bytes((one / "config.json").read_bytes())
    return one, quantizing.add_tokenizer(apart)


def parts(name: str) -> dict[str, tuple[int, int]]:
    """What a joined tensor is called apart, and the rows of each."""
    old, new = "attention.query_key_value", "self_attn.{}_proj"
    return {name.replace(old, new.format(letter)): rows for letter, rows in ROWS.items()}


def test_modules_have_rows_of_a_parameter(models: tuple[Path, Path]) -> None:
    """A copy's have rows of its own, wherever it is."""
    skeleton = Skeleton.open(Checkpoint.open(models[0]))
    block = skeleton.block(1)
    name = "model.layers.1.attention.query_key_value.weight"
    for own in (block.module, placed_block(block, torch.device("cpu")).module):
        whole = own.get_submodule("self_attn.query_key_value")
        assert isinstance(whole, Joined)
        assert torch.equal(whole.weight, block.weights[name])
        for letter, (first, last) in ROWS.items():
            layer = own.get_submodule(f"self_attn.{letter}_proj")
            assert isinstance(layer, RowsOf) and layer.joined is whole
            assert layer.out_features == last - first
            assert layer.weight.data_ptr() == whole.weight[first:last].data_ptr()
            assert layer.bias is not None and torch.equal(layer.bias, whole.bias[first:last])
    there = placed_block(block, torch.device("meta")).module
    assert there.get_submodule("self_attn.k_proj").weight.is_meta


def test_logits_are_the_same(models: tuple[Path, Path]) -> None:
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (3, 24), dtype=np.int64)
    with Workers(2) as workers:
        one, apart = (
            Skeleton.open(Checkpoint.open(folder)).logits(tokens, workers) for folder in models
        )
    assert torch.equal(one, apart)


# Rows of one tensor make up for each other by one damping, rows of three by one each.
RECIPES = {
    "w4g32-gptq": (), "w8a8-smoothquant": (), "w4a8kv4-qserve": (), "w4g128-gptq-rotated": (),
    "w4g128-awq-gptq": ("gptq.yaqa=0",), "mxfp4-awq-gptq": ("gptq.yaqa=0",),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_are_the_same(recipe: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    """Those of all tensors, whatever scales were searched, folded, or measured."""
    sets = ("indivisible=smaller-group", "calibration.samples=8", "calibration.length=32")
    text = quantizing.text_file(tmp_path / "text.txt")
    runs = [
        quantizing.quantize(
            folder, recipe, tmp_path / folder.name, *sets, *RECIPES[recipe],
            f"calibration.source={text}",
        )
        for folder in models
    ]  # fmt: skip
    one, apart = map(values, runs)
    quantizing.assert_reads_back(runs[0])
    joined = {name for name in one if "query_key_value" in name}
    assert len(joined) == 4 and one.keys() - joined <= apart.keys()
    for name, value in one.items():
        every = parts(name) if name in joined else [name]
        assert np.array_equal(value, np.concatenate([apart[own] for own in every])), name


def values(run: Run) -> dict[str, Any]:
    """What each tensor of the blocks is worth in the artifact."""
    found = {name: quant.dequantize() for name, quant in run.quants.items()}
    return run.weights | found


def test_what_errors_cost_is_the_same(models: tuple[Path, Path], tmp_path: Path) -> None:
    one, apart = (measured(folder, tmp_path / folder.name).matrices for folder in models)
    for name, slopes in one.items():
        (slope,) = slopes.values()
        every = parts(name) if "query_key_value" in name else [name]
        own = [apart[part][-1] for part in every]
        assert np.array_equal(slope.rows, np.concatenate([part.rows for part in own])), name
        assert all(np.array_equal(slope.columns, part.columns) for part in own)
        assert slope.rows.any() or ".experts." in name
    assert sum("query_key_value" in name for name in one) == 2


def test_rows_of_different_matrices_do_not_make_up_for_each_other(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    found = []
    for folder in models:
        skeleton, tokens, ends = ends_of(folder, tmp_path / folder.name)
        with Workers(2) as workers:
            stream = skeleton.embed(tokens)
            block = skeleton.block(0)
            sites = Tracer().sites(block, stream)
            names = {name for site in sites.sites for name in site.names}
            found.append(Feedback(ends).of(block, Passage.of(stream, workers, None), sites, names))
    one, apart = found
    assert len(one) == 5 and len(apart) == 7
    name = "model.layers.0.attention.query_key_value.weight"
    expected = np.zeros((128, 128), np.float32)
    for part, rows in parts(name).items():
        expected[slice(*rows), slice(*rows)] = apart[part]
    assert np.array_equal(one[name], expected) and expected.any(axis=1).all()


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w8a8-dynamic"])
def test_generated_from(
    recipe: str, models: tuple[Path, Path], tmp_path: Path, device: Device
) -> None:
    made = [tmp_path / folder.name for folder in models]
    for folder, out in zip(models, made, strict=True):
        quantizing.quantize(folder, recipe, out, "indivisible=smaller-group")
    here = [generate(out, "Group", 8, None, QUIET) for out in made]
    assert here[0].tokens == here[1].tokens
    check(made[0], here[0], 1e-3)
    check(made[0], generate(made[0], "Group", 4, device, QUIET), 0.1)


def test_parts_that_read_different_inputs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No one Hessian is that of both."""
    folder = quantizing.build("qwen2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for block in range(2):
        prefix = f"model.layers.{block}.self_attn"
        both = [tensors.pop(f"{prefix}.{letter}_proj.weight") for letter in "qo"]
        tensors[f"{prefix}.both.weight"] = torch.cat(both)
    save_file(tensors, folder / "model.safetensors")
    converter = core_model_loading.WeightConverter(
        ".both.weight", [".q_proj.weight", ".o_proj.weight"],
        operations=[core_model_loading.Split(0)],
    )  # fmt: skip
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: [converter])
    skeleton = Skeleton.open(Checkpoint.open(folder))
    block, stream = skeleton.block(0), skeleton.embed(np.arange(3, 40)[None])
    with pytest.raises(UnsupportedError, match=r"self_attn\.both\.weight: it is several matrices"):
        Tracer().sites(block, stream)
