"""gptq.yaqa in whole runs: codes, notes, kills, damage, and what has no gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from qtool.blockwise import row_feedback, row_rounding
from qtool.calibrating.stats import MIN_EXPERT_TOKENS
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.gradients.block_gradients import Ends
from qtool.messages.progress import Progress
from qtool.quantizing.calibrate import calibrate
from qtool.recipe.recipe import load
from qtool.streaming.workers import Workers
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf
from support.gguf.gguf_runs import goes_on, without_tokenizers, write
from support.models.small_models import checkpoint, models
from support.runs import quantizing
from support.runs.killed_runs import Died, dying

__all__ = ["models", "without_tokenizers"]

QUIET = Progress(quiet=True)


def sets(text: Path, samples: int = 4) -> list[str]:
    return [
        f"gptq.yaqa={samples}", f"calibration.source={text}",
        "calibration.samples=12", "calibration.length=64",
    ]  # fmt: skip


def test_other_codes_and_no_more(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    found = []
    for samples in (0, 4):
        chosen = ["weights.group_size=32", *sets(text, samples)]
        found.append(quantizing.quantize(model, "w4g128-gptq", tmp_path / f"{samples}", *chosen))
    plain, fed = found
    for name, quant in fed.quants.items():
        alike = float(np.mean(quant.codes == plain.quants[name].codes))
        if len(quant.codes) > row_rounding.rows_of_a_part(len(quant.codes)):
            assert alike < 0.9, name
        elif "layers.0." in name:  # rows that are rounded together, of the same input
            assert alike == 1, name
    (note,) = (note for note in fed.summary.notes if "gptq.yaqa" in note)
    # Whole micro-batches, and no more than there are.
    assert "in 3 of 3 blocks, by gradients over 12 samples" in note
    assert not any(one.startswith(row_feedback.FED_BACK) for one in fed.summary.notes)
    assert not any("gptq.yaqa" in note for note in plain.summary.notes)
    assert verify_artifact(fed.out, against=model).ok


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_a_gguf(name: str, models: Path, tmp_path: Path) -> None:
    """Of experts, what reads a norm is as it was in the first block, which has the same input."""
    model = checkpoint(models, name, "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    found = []
    for samples in (0, 4):
        out = tmp_path / f"{samples}.gguf"
        summary = write(model, out, "q4_0", "method=gptq", *sets(text, samples))
        assert verify_artifact(out, against=model).ok
        assert any("gptq.yaqa" in note for note in summary.notes) is bool(samples)
        with GgufFile.open(out) as file:
            assert ("yaqa" in str(file.metadata)) is bool(samples)
            names = [one for one in file.tensors if one.startswith("blk.0.") and "norm" not in one]
            found.append({one: gguf_from_hf.raw(file, one).tobytes() for one in names})
    differ = {one for one in found[0] if found[0][one] != found[1][one]}
    assert any("attn" in one for one in differ)
    assert ("blk.0.ffn_down_exps.weight" in differ) is (name == "mixtral")
    for kind in ("gate_exps", "up_exps", "gate_inp"):
        assert not any(kind in one for one in differ)


@pytest.mark.parametrize(
    ("recipe", "more", "lines"),
    [
        ("w4g128-gptq", ["weights.group_size=32", "gptq.gptaq=0.5", "gptq.guided=0.5"], 9),
        ("q4_0", ["method=gptq"], 4),
        pytest.param("q4_0", ["method=gptq"], 9, marks=pytest.mark.slow),
        pytest.param(
            "w4g128-awq-gptq", ["weights.group_size=32", "awq.grid=2"], 2, marks=pytest.mark.slow
        ),
        pytest.param("q4_0", ["method=gptq", "gptq.gptaq=0.5"], 9, marks=pytest.mark.slow),
        pytest.param("nvfp4-awq-gptq", ["awq.grid=2"], 9, marks=pytest.mark.slow),
    ],
)
def test_killed_it_goes_on_to_the_same_bytes(
    recipe: str, more: list[str], lines: int, models: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """While gradients are measured and between blocks, on another number of threads."""
    model = checkpoint(models, "llama", "bfloat16").path
    chosen = [*more, *sets(quantizing.text_file(tmp_path / "text.txt"))]

    goes_on(lines, model, recipe, chosen, tmp_path, monkeypatch)
    assert not [*tmp_path.glob(".*partial*")]


@pytest.mark.parametrize("damage", ["truncated", "gone"])
@pytest.mark.parametrize("lines", [8, 15])
def test_gradients_that_are_damaged_meanwhile_are_measured_again(
    damage: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are measured, and behind that."""
    model = quantizing.build("llama", tmp_path / "model")
    chosen = ["weights.group_size=32", *sets(quantizing.text_file(tmp_path / "text.txt"))]
    whole = quantizing.quantize(model, "w4g128-gptq", tmp_path / "whole", *chosen).out
    out = tmp_path / "killed"
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(lines, patched)
        quantizing.quantize(model, "w4g128-gptq", out, *chosen)
    (folder,) = tmp_path.glob(".killed.partial*")
    ends = [*folder.glob("ends/ends-*")]
    assert ends
    for path in ends:
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-4])
    quantizing.quantize(model, "w4g128-gptq", out, *chosen)
    assert quantizing.files(out) == quantizing.files(whole)


def codes(
    model: Path, out: Path, recipe: str, *chosen: str
) -> tuple[list[str], dict[str, NDArray[np.uint8]]]:
    """Notes of a run, and what it wrote of matrices."""
    if recipe.startswith("w"):
        run = quantizing.quantize(model, recipe, out, "weights.group_size=32", *chosen)
        return run.summary.notes, {name: quant.codes for name, quant in run.quants.items()}
    notes = write(model, out, recipe, "method=gptq", *chosen).notes
    with GgufFile.open(out) as file:
        return notes, {name: gguf_from_hf.raw(file, name) for name in file.tensors}


def failing(monkeypatch: pytest.MonkeyPatch, said: str) -> list[int]:
    """Nothing passes back through a block from now on; gets an entry for each try."""
    tries, grad = list[int](), torch.autograd.grad

    def fails(outputs: Any, inputs: Any, *more: Any, **how: Any) -> Any:
        if isinstance(inputs, torch.Tensor):  # what the head reads
            return grad(outputs, inputs, *more, **how)
        tries.append(1)
        raise RuntimeError(said)

    monkeypatch.setattr(torch.autograd, "grad", fails)
    return tries


@pytest.mark.parametrize(("recipe", "lines"), [("w4g128-gptq", 9), ("q4_0", 8)])
def test_without_a_gradient_rows_are_rounded_alone(
    recipe: str, lines: int, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is said once, and known to whoever goes on."""
    model = checkpoint(models, "llama", "bfloat16").path
    chosen = sets(quantizing.text_file(tmp_path / "text.txt"))
    _, plain = codes(model, tmp_path / "plain", recipe, *chosen, "gptq.yaqa=0")
    tries = failing(monkeypatch, "derivative for aten::some is not implemented")
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(lines, patched)
        codes(model, tmp_path / "out", recipe, *chosen)
    assert tries and not [*tmp_path.glob(".out.partial*/ends/*-*")]
    tries.clear()
    notes, found = codes(model, tmp_path / "out", recipe, *chosen)
    assert not tries
    (said,) = (note for note in notes if "yaqa" in note)
    assert said.startswith(
        "rows of no matrix compensated for each other (gptq.yaqa): model.layers."
    )
    assert "aten::some" in said
    assert found and all(np.array_equal(one, plain[name]) for name, one in found.items())


def test_a_device_that_fails_is_no_missing_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, and goes on once it is well, as if nothing had been."""
    model = quantizing.build("llama", tmp_path / "model")
    chosen = ["weights.group_size=32", *sets(quantizing.text_file(tmp_path / "text.txt"))]
    whole = quantizing.quantize(model, "w4g128-gptq", tmp_path / "whole", *chosen).out
    with monkeypatch.context() as patched:
        failing(patched, "CUDA error: unspecified launch failure")
        with pytest.raises(UnsupportedError, match=r"launch failure.*gptq\.yaqa=0"):
            quantizing.quantize(model, "w4g128-gptq", tmp_path / "out", *chosen)
    quantizing.quantize(model, "w4g128-gptq", tmp_path / "out", *chosen)
    assert quantizing.files(tmp_path / "out") == quantizing.files(whole)


def test_with_statistics_of_a_file_rows_are_rounded_alone(tmp_path: Path) -> None:
    model, stats = quantizing.build("llama", tmp_path / "model"), tmp_path / "stats"
    chosen = ["weights.group_size=32", *sets(quantizing.text_file(tmp_path / "text.txt"))]
    recipe = load("w4g128-gptq", chosen)
    calibrate(Checkpoint.open(model), stats, recipe.calibration, frozenset({"gram"}), 2, QUIET)
    found = [
        quantizing.quantize(model, "w4g128-gptq", tmp_path / more, *chosen, more, stats=stats)
        for more in ("gptq.yaqa=0", "gptq.yaqa=4")
    ]
    plain, fed = ([note for note in run.summary.notes if "yaqa" in note] for run in found)
    assert (len(plain), len(fed)) == (0, 1) and "holds no text" in fed[0]
    assert all(
        np.array_equal(q.codes, found[0].quants[n].codes) for n, q in found[1].quants.items()
    )


def test_the_row_of_a_weight_that_is_too_large(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    name = "model.layers.0.self_attn.o_proj.weight"
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    tensors[name][37, 3] = 3e6
    save_file(tensors, path, {"format": "pt"})
    chosen = ["weights.group_size=32", *sets(quantizing.text_file(tmp_path / "text.txt"))]
    with pytest.raises(UnsupportedError, match=r"o_proj.*row 37, group 0"):
        quantizing.quantize(model, "w4g128-gptq", tmp_path / "out", *chosen)


def test_gradients_that_are_not_finite_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    behind = Ends.behind

    def infinite(self: Ends, index: int, workers: Workers) -> Any:
        found = [one.clone() for one in behind(self, index, workers)]
        found[0][0, 1, 2] = torch.inf
        return found

    monkeypatch.setattr(Ends, "behind", infinite)
    chosen = ["weights.group_size=32", *sets(quantizing.text_file(tmp_path / "text.txt"))]
    run = quantizing.quantize(model, "w4g128-gptq", tmp_path / "out", *chosen)
    said = [note for note in run.summary.notes if "gptq.yaqa" in note]
    assert len(said) == 3 and all("a gradient is not finite" in note for note in said)
    plain = quantizing.quantize(model, "w4g128-gptq", tmp_path / "plain", *chosen, "gptq.yaqa=0")
    for name, quant in plain.quants.items():
        assert np.array_equal(quant.codes, run.quants[name].codes)


def test_experts(tmp_path: Path) -> None:
    """What gives the hidden states is rounded otherwise, on one thread or two alike; what reads the
    norm is not, in the first block, where the input is the same."""
    model = quantizing.build("mixtral", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    found = {}
    for name, samples, threads in (("plain", 0, 1), ("one", 4, 1), ("two", 4, 2)):
        chosen = ["weights.group_size=32", *sets(text, samples)]
        made = quantizing.quantize(model, "w4g128-gptq", tmp_path / name, *chosen, threads=threads)
        assert verify_artifact(made.out, against=model).ok
        found[name] = {key: quant.codes for key, quant in made.quants.items() if "layers.0." in key}
    plain, one, two = found.values()
    (note,) = (note for note in made.summary.notes if "gptq.yaqa" in note)
    assert "12 samples, of routed experts those of their last matrices (gptq.yaqa)" in note
    (tokens, *_) = (report.tokens for report in made.summary.experts)
    rare = {n for n, seen in enumerate(tokens) if seen < MIN_EXPERT_TOKENS}
    experts = [name for name in plain if "experts" in name]
    assert len(experts) == 3 * 4 and len(rare) < 3
    for name in plain:
        assert np.array_equal(one[name], two[name])
        if name in experts:
            alone = "w2" not in name or int(name.split(".")[-3]) in rare
            assert np.array_equal(plain[name], one[name]) is alone, name
