"""Scales of GGUF blocks tuned: which numbers of a block are moved, and whole runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from qtool import native_gguf
from qtool.errors import UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.gptq.levels import SWEPT
from qtool.gguf.inspect import GgufInspection
from qtool.gguf.inspect_text import summary
from qtool.gguf.open import open_source
from qtool.gguf_types import BY_NAME
from qtool.methods import tune
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.quantizing.gguf.gptq.tuned_blocks import FIELDS, BlockMatrix
from qtool.recipe import recipe as recipes
from qtool.recipe.gguf import GgufRecipe
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf
from support.gguf.gguf_runs import begun_once, sets, without_tokenizers, write
from support.gguf.gguf_swept import check_fed, model_of
from support.models.small_models import models
from support.runs.killed_runs import damage

__all__ = ["models", "sets", "without_tokenizers"]

FEW = ["method=[gptq, tune]", "tune.steps=3", "tune.rate=0.001"]


def matrix_of(name: str, rows: int = 5) -> BlockMatrix:
    rng = np.random.default_rng(3)
    weight = rng.normal(0.1, 1.0, size=(rows, 512)).astype(np.float32)
    blocks = native_gguf.encode(weight, BY_NAME[name], np.ones(512, np.float32), threads=1)
    return BlockMatrix(blocks, BY_NAME[name], weight.shape)


def test_every_swept_type_with_a_scale_of_its_own_is_tuned() -> None:
    assert set(SWEPT) - set(FIELDS) == {"IQ1_M", "MXFP4", "NVFP4"}


@pytest.mark.parametrize("name", FIELDS)
def test_all_weights_of_a_block_are_multiples_of_its_numbers(name: str) -> None:
    """Twice the numbers are twice the weights, to the bit; with one of them what belongs to it."""
    matrix = matrix_of(name)
    plain = matrix.dequantize()
    scales = matrix.scales()
    assert np.array_equal(matrix.tuned(scales).blocks, matrix.blocks)
    scales.moved[:] = np.log(2)
    assert np.array_equal(matrix.tuned(scales).dequantize(), 2 * plain)
    if scales.offset is None:
        return
    offset = scales.offset.repeat_interleave(16, dim=1).numpy()
    assert offset.any()
    scales.moved[1] = 0
    both = matrix.tuned(scales).dequantize()
    np.testing.assert_allclose(both - offset, 2 * (plain - offset), atol=1e-5)


def test_one_block_is_moved_alone() -> None:
    matrix = matrix_of("Q6_K")
    scales = matrix.scales()
    scales.moved[0, 2, 1] = 0.01
    found, plain = matrix.tuned(scales).dequantize(), matrix.dequantize()
    assert np.array_equal(np.argwhere((found != plain).reshape(5, 2, 256).any(2)), [[2, 1]])


def test_no_scale_becomes_infinite() -> None:
    matrix = matrix_of("Q8_0")
    scales = matrix.scales()
    scales.moved[:] = 30.0
    assert np.isfinite(matrix.tuned(scales).dequantize()).all()


def test_gradients_of_scales_and_minima_are_those_of_the_definition() -> None:
    matrix = matrix_of("Q4_K", rows=300)
    scales = matrix.scales()
    weight = torch.from_numpy(matrix.dequantize())
    assert scales.offset is not None
    offset = scales.offset.double().repeat_interleave(16, dim=1)
    gradient = torch.randn(weight.shape)
    p = (0.1 * torch.randn(scales.moved.shape, dtype=torch.float64)).requires_grad_()
    p_of = p.repeat_interleave(256, dim=2)
    moved = (weight.double() - offset) * p_of[0].exp() + offset * p_of[1].exp()
    (moved * gradient).sum().backward()
    scales.offset = (scales.offset * p.detach()[1].exp().repeat_interleave(16, dim=1)).float()
    found = tune.gradient(scales, moved.detach().float(), gradient)
    assert p.grad is not None
    torch.testing.assert_close(found, p.grad.float(), rtol=1e-4, atol=1e-4)
    # A step moves both, and the weights are what both make of them.
    before = matrix.scales()
    assert before.offset is not None
    tune.step(before, weight, found, 1, 0.01)
    p_of = before.moved.double().repeat_interleave(256, dim=2)
    plain = torch.from_numpy(matrix.dequantize()).double() - offset
    expected = plain * p_of[0].exp() + offset * p_of[1].exp()
    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "recipe", "more"),
    [
        ("llama", "q4_k_m", ["transforms=[awq]"]),  # small widths: Q5_0 and others
        ("phi3", "q5_k_m", []),  # q, k and v in one matrix, gate and up in another
        ("gpt_neox", "q8_0", []),  # rows of q, k and v by heads
        pytest.param("tiny", "q4_k_m", ["transforms=[awq]"], marks=pytest.mark.slow),
        ("tiny", "q2_k", []),
        ("tiny", "iq3_xxs", []),
        ("tiny", "iq1_m", []),  # nothing to move in most matrices
    ],
)
def test_later_blocks_are_fed_by_what_the_file_says(
    name: str, recipe: str, more: list[str], models: Path, sets: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    chosen = [recipe, *FEW, *more, *sets]
    check_fed(model_of(models, name), tmp_path / "out.gguf", chosen, monkeypatch)


def raw(path: Path) -> dict[str, np.ndarray]:
    with GgufFile.open(path) as file:
        return {
            name: np.frombuffer(gguf_from_hf.raw(file, name).tobytes(), np.uint8)
            for name, tensor in file.tensors.items()
            if tensor.type.name in FIELDS and name.startswith("blk.0.")
        }


@pytest.mark.slow  # of safetensors there is one that is not
def test_a_run_differs_from_the_plain_one_in_scales_alone(
    models: Path, sets: list[str], tmp_path: Path
) -> None:
    """In its first block; and threads change no byte."""
    model = model_of(models, "tiny")
    more = ["transforms=[awq]", *sets]
    plain, out, other = tmp_path / "plain.gguf", tmp_path / "out.gguf", tmp_path / "other.gguf"
    write(model, plain, "q4_k_m", "method=gptq", *more)
    made = write(model, out, "q4_k_m", *FEW, *more, threads=1)
    write(model, other, "q4_k_m", *FEW, *more, threads=3)
    assert out.read_bytes() == other.read_bytes()
    assert any("of 2 blocks were tuned" in note for note in made.notes)
    with GgufFile.open(out) as file:
        said = dict(summary(GgufInspection(file)))
    assert said["made by"] == "recipe q4_k_m: awq, then gptq, then tune"
    assert said["calibrated on"].startswith("8 samples of 32 tokens of ")
    before, after = raw(plain), raw(out)
    moved = 0
    with GgufFile.open(out) as file:
        for name, blocks in before.items():
            type_ = file.tensors[name].type
            changed = (blocks != after[name]).reshape(-1, type_.nbytes).any(0)
            fields = {at + byte for at in FIELDS[type_.name] for byte in (0, 1)}
            assert set(np.flatnonzero(changed)) <= fields, name
            moved += changed.any()
    assert moved >= 6
    assert verify_artifact(out, against=model).ok


@pytest.mark.slow
def test_a_run_that_dies_goes_on(
    models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["q4_k_m", *FEW, *sets]
    out = begun_once(models, model_of(models, "tiny"), tmp_path, monkeypatch, *chosen)
    write(model_of(models, "tiny"), out, *chosen)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("which", [pytest.param(".", marks=pytest.mark.slow), "originals"])
def test_damaged_states_are_made_again(
    which: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the quantized model, or of the original: both begin anew."""
    chosen = ["q4_k_m", *FEW, *sets]
    out = begun_once(models, model_of(models, "tiny"), tmp_path, monkeypatch, *chosen)
    kept = tmp_path / ".out.partial" / which / "hidden-1"  # before the block that it was at
    damage(kept, kept.stat().st_size // 2)
    write(model_of(models, "tiny"), out, *chosen)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_routed_experts_are_refused(models: Path, sets: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not tune the scales of routed experts"):
        write(model_of(models, "mixtral"), tmp_path / "out.gguf", "q3_k_m", *FEW, *sets)
    assert not list(tmp_path.iterdir())


def test_what_the_recipe_says(models: Path) -> None:
    recipe = recipes.load("q3_k_m-awq-gptq", ["method=[gptq, tune]"])
    plain = recipes.load("q3_k_m-awq-gptq")
    assert isinstance(recipe, GgufRecipe) and isinstance(plain, GgufRecipe)
    assert recipe.tunes and recipe.sweeps and not plain.tunes
    said = recipe.effective()
    assert said["method"] == ["gptq", "tune"] and said["tune"]["steps"] == recipe.tune.steps
    assert "tune" not in plain.effective() and plain.effective()["method"] == "gptq"
    source = open_source(model_of(models, "tiny"))
    tuned, alone = make_gguf_plan(recipe, source), make_gguf_plan(plain, source)
    assert tuned.seconds > alone.seconds
    assert tuned.memory.disk_bytes > alone.memory.disk_bytes
