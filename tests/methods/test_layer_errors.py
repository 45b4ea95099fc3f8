"""Each layer's error against what its bit width explains; and numbers that go wrong, loudly."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError
from qtool.formats.safetensors_file import from_float32
from qtool.gguf_types import BY_NAME
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.messages.summary import LayerReport, Summary
from qtool.methods import rtn
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.quantizing.pipeline import run
from qtool.recipe.recipe import Recipe, load
from qtool.runs import layer_errors
from qtool.runs.gguf_request import GgufRequest
from qtool.runs.layer_errors import checked, explained
from qtool.runs.request import Request
from qtool.scheme import Scheme
from qtool.verification.run import verify_artifact
from support.runs.quantizing import first_block_of_tiny

ODD = "model.layers.2.mlp.up_proj.weight"
ODD_IN_FIRST = "model.layers.0.mlp.up_proj.weight"
SMALL = ["calibration.samples=2", "calibration.length=64"]


def changed(
    folder: Path, name: str, change: Callable[[np.ndarray], None], source: Path | None = None
) -> Path:
    """The shipped model, or `source`, with the values of one tensor [out, in] changed in place."""
    ignored = shutil.ignore_patterns("*.py", "__*")
    shutil.copytree(source or tiny_folder(), folder, ignore=ignored)
    checkpoint = Checkpoint.open(folder)
    values, info = checkpoint.float32(name), checkpoint.tensors[name]
    change(values)
    raw = from_float32(values, info.dtype, name)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(info.start)
        file.write(raw.tobytes())
    return folder


def quantize(model: Path, recipe: str, out: Path, *sets: str, log: Path | None = None) -> Summary:
    loaded = load(recipe, sets)
    progress = Progress(quiet=True, log=log)
    if isinstance(loaded, Recipe):
        return run(Request("m", model, loaded, out, None, 2, 1 << 30), progress)
    return run_gguf(GgufRequest("m", model, loaded, out, 2), progress)


@pytest.fixture(scope="module")
def first_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_block_of_tiny(tmp_path_factory.mktemp("first") / "model")


def outliers(values: np.ndarray) -> None:
    """One weight in 128 is thirty times as large as the others are: most of those become zeros."""
    values[:, ::128] += 30 * values.std()


@pytest.mark.parametrize(
    "recipe", ["w4g128-rtn", "w4g128-gptq", "q4_k_m", pytest.param("nvfp4", marks=pytest.mark.slow)]
)
def test_a_layer_with_outliers_is_told_of(recipe: str, tmp_path: Path) -> None:
    """In the summary, the record, the card and the log; and no layer of the model as it is."""
    sets = SMALL if recipe == "w4g128-gptq" else []
    plain = quantize(tiny_folder(), recipe, tmp_path / "plain", *sets)
    assert not any("bit width explains" in note for note in plain.notes)
    before = max(layer.relative_error for layer in plain.layers)
    model = changed(tmp_path / "model", ODD, outliers)
    log, out = tmp_path / "log", tmp_path / "out"
    odd = quantize(model, recipe, out, *sets, log=log)
    named = "blk.2.ffn_up.weight" if recipe == "q4_k_m" else ODD
    (found,) = (layer for layer in odd.layers if layer.name == named)
    assert found.relative_error < 3 * before  # by itself it tells little
    (note,) = (note for note in odd.notes if "bit width explains" in note)
    said = f"1 layer is rounded more coarsely than the bit width explains: {named} ("
    assert note.startswith(said) and "override" in note
    assert any("bit width explains" in line for line in odd.lines())
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["text"] for event in events if event["event"] == "flagged"] == [note]
    if out.is_dir():
        assert note in json.loads((out / "qtool.json").read_text())["notes"]
        assert note in (out / "README.md").read_text()


def layer(name: str, coarse: float | None, error: float = 0.1) -> LayerReport:
    return LayerReport(name, "w4 g128 asym", error, "weights", coarse)


def test_what_is_usual_in_a_model_is_not_odd() -> None:
    assert checked([layer(str(n), 2.4) for n in range(9)]) is None
    assert checked([layer(str(n), 4.0) for n in range(9)]) is None  # long tails everywhere
    assert checked([layer(str(n), 13.0) for n in range(9)]) is not None  # nothing is left
    assert checked([]) is checked([layer("a", None)]) is None
    some = [layer(str(n), 1.5) for n in range(9)]
    assert checked([*some, layer("odd", 3.7)]) is None
    assert checked([*some, layer("odd", 3.8, error=1e-5)]) is None
    said = checked([*some, layer("odd", 3.8)])
    assert said is not None and said.startswith("1 layer is") and "odd (3.8 times)" in said
    many = checked([*some, *(layer(f"odd{n}", 4.0 + n) for n in range(7))])
    assert many is not None and many.startswith("7 layers are") and " and 2 more" in many
    assert many.index("odd6") < many.index("odd5")


@pytest.mark.parametrize(
    "scheme", [Scheme(4, 128, False), Scheme(8, -1, True), Scheme(3, 64, True)]
)
def test_normally_distributed_weights_are_what_is_explained(scheme: Scheme) -> None:
    weight = np.random.default_rng(1).standard_normal((300, 512), np.float32)
    quant = rtn.quantize(weight, None, scheme, rtn.Options()).quant
    found = layer_errors.coarseness(weight * 3, quant.dequantize() * 3, scheme)
    assert found == pytest.approx(1, abs=0.05)
    assert layer_errors.coarseness(weight * 0, weight * 0, scheme) is None
    pruned = np.where(weight > 0, weight, np.float32(0))  # zeros are no weights that count
    quant = rtn.quantize(pruned, None, scheme, rtn.Options()).quant
    found = layer_errors.coarseness(pruned, quant.dequantize(), scheme)
    assert found is not None and 0.4 < found < 1.6


def test_what_is_explained_goes_by_bits_and_groups() -> None:
    by_bits = [explained(Scheme(bits, 128, True), 512) for bits in (2, 3, 4, 8)]
    assert by_bits == sorted(by_bits, reverse=True) and 0.004 < by_bits[-1] < 0.008
    by_group = [explained(Scheme(4, size, True), 512) for size in (32, 128, -1)]
    assert by_group == sorted(by_group)
    assert explained(BY_NAME["Q4_K"], 512) < explained(BY_NAME["Q3_K"], 512)
    assert explained(BY_NAME["IQ2_XXS"], 256) < 0.5  # needs importance
    layer_errors.explained.cache_clear()
    assert explained(Scheme(4, 128, True), 512) == by_bits[2]


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_an_error_that_is_no_number(error: float) -> None:
    with pytest.raises(FormatError, match=r"^a\.weight: .*error (nan|inf)\); leave it"):
        checked([layer("a.weight", None, error)])


def infinite(values: np.ndarray) -> None:
    values[3, 5] = np.inf


def not_a_number(values: np.ndarray) -> None:
    values[3, 5] = np.nan


def huge(values: np.ndarray) -> None:
    values[:] *= np.float32(3e36) / np.abs(values).max()


WRONG = {
    not_a_number: r"holds nan at \[3, 5\]; weights must be finite|has a weight that is not finite",
    infinite: r"holds inf at \[3, 5\]; weights must be finite|has a weight that is not finite",
    huge: r"larger scale than float16 holds .* leave this tensor dense|too large for Q4_K; give"
    r"|the input of .*down_proj.weight: calibration met infinite .* `qtool inspect MODEL --tensor",
}


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize(
    "recipe", ["w4g128-rtn", "w4g128-gptq", "w4g128-awq", "fp8-dynamic", "q4_k_m"]
)
def test_weights_that_are_wrong(
    change: Callable[[np.ndarray], None], recipe: str, first_block: Path, tmp_path: Path
) -> None:
    """A sentence that names the tensor and a remedy, and no artifact."""
    if change is huge and recipe == "fp8-dynamic":
        pytest.skip("its scales are bfloat16, which has room for it")
    if change is not huge and recipe == "w4g128-awq":
        pytest.skip("as with GPTQ")
    model = changed(tmp_path / "model", ODD_IN_FIRST, change, first_block)
    sets = SMALL if recipe in ("w4g128-gptq", "w4g128-awq") else []
    with pytest.raises(QtoolError, match=WRONG[change]) as error:
        quantize(model, recipe, tmp_path / "out", *sets)
    said = str(error.value)
    assert ODD_IN_FIRST in said or "blk.0.ffn_up.weight" in said or change is huge
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def zeros(values: np.ndarray) -> None:
    values[:, :128] = 0
    values[7] = 0


@pytest.mark.parametrize(
    "recipe", ["w4g128-rtn", "w4g128-gptq", "fp8-dynamic", "nvfp4", "q4_k_m", "q8_0"]
)
def test_groups_of_zeros_stay_zeros(recipe: str, first_block: Path, tmp_path: Path) -> None:
    model = changed(tmp_path / "model", ODD_IN_FIRST, zeros, first_block)
    sets = SMALL if recipe == "w4g128-gptq" else []
    summary = quantize(model, recipe, tmp_path / "out", *sets)
    assert all(np.isfinite(layer.relative_error) for layer in summary.layers)
    assert not any("bit width explains" in note for note in summary.notes)


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "fp8-dynamic", "fp8-block", "nvfp4", "mxfp4"])
def test_a_matrix_of_zeros_passes_its_checks(
    recipe: str, first_block: Path, tmp_path: Path
) -> None:
    """As of a block that was put in: FP8 and FP4 of it were made, and then called damaged."""
    model = changed(tmp_path / "model", ODD_IN_FIRST, lambda values: values.fill(0), first_block)
    quantize(model, recipe, tmp_path / "out")
    verdict = verify_artifact(tmp_path / "out", against=model)
    assert verdict.ok, verdict.findings
    (found,) = (one for one in verdict.findings if one.check == "codes")
    assert found.severity == "warning" and "every weight is 0" in found.message
    weights = tmp_path / "out" / "model.safetensors"
    if recipe.startswith("fp8"):  # with scales of something else it is damage, as ever
        tensors = load_file(weights)
        (scale,) = (n for n in tensors if ODD_IN_FIRST.removesuffix("weight") in n and "scale" in n)
        tensors[scale] = torch.full_like(tensors[scale], 0.01)
        save_file(tensors, weights, metadata={"format": "pt"})
        errors = [one for one in verify_artifact(tmp_path / "out").findings if one.check == "codes"]
        assert [one.severity for one in errors] == ["error"]
