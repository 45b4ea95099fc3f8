"""`qtool fit` for safetensors: bits of what engines fuse, in formats that hold several."""

import json
from pathlib import Path

import pytest

from qtool.checkpoints import structure
from qtool.fitting.fit import fit
from qtool.fitting.request import FitRequest, Fitted
from qtool.messages.progress import Progress
from qtool.recipe.recipe import Recipe, load
from support.fitting.fitting_runs import SMALL, tiny, widths
from support.runs import quantizing
from support.runs.quantizing import Call

__all__ = ["tiny"]


@pytest.mark.parametrize(
    ("recipe", "types", "bits"),
    [("w4g128-gptq", "3,4,8", 7.4), ("w4a16-ct", "4,8", 8.5), ("w3g128-rtn", "3,4", 6.9)],
)
def test_from_bits_to_an_artifact(
    recipe: str, types: str, bits: float, tiny: Path, tmp_path: Path, call: Call
) -> None:
    """Bits are those that were chosen, alike in what engines fuse, and the size is kept."""
    mine, out = tmp_path / "mine.yaml", tmp_path / "out"
    asked = ("--recipe", recipe, "--types", types, "--bits", bits, "-o", mine, *SMALL, "--json")
    made = call("fit", tiny, *asked)
    assert made.status == 0, made.err
    found = json.loads(made.out)
    assert bits - 0.4 < found["bits_per_weight"] <= bits
    assert found["before"]["loss"] > found["loss"] > 0
    run = call("quantize", tiny, "--recipe", mine, "-o", out, *SMALL, "--json")
    assert run.status == 0, run.err
    assert json.loads(run.out)["bits_per_weight"] == pytest.approx(found["bits_per_weight"])
    stored = widths(out)
    chosen = {one["name"]: int(one["type"]) for one in found["chosen"]}
    assert {structure.fused_key(name) for name in stored} == chosen.keys()
    assert all(chosen[structure.fused_key(name)] == width for name, width in stored.items())
    assert len(set(stored.values())) > 1
    assert sum(one["tensors"] for one in found["chosen"]) == len(stored) == 14
    assert call("verify", out, "--against", tiny).status == 0


def test_experts_of_a_block_have_the_same_bits(tmp_path: Path) -> None:
    model = quantizing.build("mixtral", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt", 6000)
    sets = [f"calibration.source={text}", "weights.group_size=32"]
    found = fitted(model, tmp_path / "mine.yaml", 9.0, *sets)
    experts = [name for name in found.chosen if name.endswith("experts")]
    assert experts and not found.kept
    assert all(found.members[name] > 4 for name in experts)
    recipe = load(str(tmp_path / "mine.yaml"))
    assert isinstance(recipe, Recipe)
    assert found.made.bits_per_weight <= 9.0


def test_an_override_of_the_recipe_stays(tiny: Path, tmp_path: Path) -> None:
    sets = ["overrides=[{match: '*.down_proj', weights: {bits: 8}}, {match: '*.0.*', dense: true}]"]
    found = fitted(tiny, tmp_path / "mine.yaml", 12.5, *sets)
    assert sorted(found.chosen) == [
        "model.layers.1.mlp.gate_proj+up_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.self_attn.q_proj+k_proj+v_proj",
    ]
    recipe = load(str(tmp_path / "mine.yaml"))
    assert isinstance(recipe, Recipe)
    assert [one.match for one in recipe.overrides[:2]] == ["*.down_proj", "*.0.*"]
    (note,) = found.notes
    assert note.endswith("not chosen: model.layers.1.mlp.down_proj.weight 8 bits")


def test_a_gguf_file_is_refused(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "f16.gguf"
    assert call("quantize", "tiny", "--recipe", "f16", "-o", file).status == 0
    asked = ("--bits", 6, "--recipe", "w4g128-gptq", "-o", tmp_path / "mine.yaml")
    found = call("fit", file, *asked)
    assert found.status == 1 and "makes safetensors; take a GGUF recipe" in found.err


def fitted(model: Path, out: Path, bits: float, *sets: str) -> Fitted:
    recipe = load("w4g128-gptq", sets)
    settings = recipe.calibration.model_copy(update={"samples": 4, "length": 64})
    request = FitRequest(model, recipe, settings, out, None, bits, "4,8", None, threads=2)
    return fit(request, Progress(quiet=True))
