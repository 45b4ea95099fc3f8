"""Learned rotations: what they cost, that they are proved too, and runs that go on with them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from qtool.planning.plan import make_plan
from qtool.recipe import recipe as recipes
from qtool.recipe.rotate import RotateOptions
from qtool.streaming.skeleton import Skeleton
from qtool.transforms import rotate, rotated, rotation, rotations
from qtool.transforms.rotated import Rotated
from support.models import arch_models
from support.models.small_models import checkpoint, difference, logits, models
from support.runs import quantizing
from support.transforms.rotating import CENTERED, quiet, settings

__all__ = ["models"]


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_learned_rotations_cost_less_and_change_no_logits(name: str, models: Path) -> None:
    from qtool.messages.progress import Progress
    from qtool.transforms import learned

    source = checkpoint(models, name)
    view = rotated.untied(source)
    start = rotate.prepare(view, RotateOptions(), quiet)
    recipe = recipes.load("w4-gptq-rotated")
    assert isinstance(recipe, recipes.Recipe)
    schemes = {t.name: t.scheme for t in make_plan(recipe, view).quantized if t.scheme}
    tokens = np.random.default_rng(1).integers(3, arch_models.VOCABULARY, (2, 40), dtype=np.int64)
    found = learned.learn(view, start, schemes, tokens, 20, 1.0, Progress(quiet=True))
    found.apply(view)
    assert found.r1 is not None and found.r1.kind == "learned"
    assert found.learned is not None and found.learned.count("by -") == 2, found.learned
    for one in (found.r1, *found.r2.values()):
        dense = one.dense()
        assert np.abs(dense @ dense.T - np.eye(one.size)).max() < 1e-12
    if name in CENTERED:
        assert np.abs(found.r1.dense().sum(axis=0) - 1).max() < 1e-12
    assert difference(logits(source), logits(view)) < 2e-6


def test_a_run_goes_on_with_the_rotations_that_it_learned(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.runs.sink import Sink
    from qtool.transforms import learned

    source = checkpoint(models, "llama").path
    sets = (*settings(models), "rotate.steps=4")
    whole = quantizing.quantize(source, "w4-gptq-rotated-learned", tmp_path / "whole", *sets)

    def fail(*_: object) -> None:
        raise RuntimeError("pulled out")

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "quantized", fail)
        with pytest.raises(RuntimeError, match="pulled out"):
            quantizing.quantize(source, "w4-gptq-rotated-learned", tmp_path / "out", *sets)
    monkeypatch.setattr(learned, "learn", fail)
    run = quantizing.quantize(source, "w4-gptq-rotated-learned", tmp_path / "out", *sets)
    assert quantizing.files(run.out) == quantizing.files(whole.out)


@pytest.mark.parametrize("fault", ["not orthogonal", "too large"])
def test_what_was_learned_is_proved_too(
    fault: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrices that learning began with stay where the network would be another one, or where
    a number that they spread over a row, and the learned ones do not, is too large for float16."""
    from dataclasses import replace

    from qtool.transforms import learned

    source = checkpoint(models, "llama").path
    if fault == "too large":
        source = quantizing.add_tokenizer(
            arch_models.build("llama", tmp_path / "m", dtype="float16")
        )
        state = load_file(source / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        state["model.layers.1.post_attention_layernorm.weight"][5] = 50000
        state[name][:, 5] = 0
        state[name][3, 5] = 2
        save_file(state, source / "model.safetensors", {"format": "pt"})

    def learn(view: Rotated, found: rotations.Rotations, *_: object) -> rotations.Rotations:
        assert found.r1 is not None
        matrix = np.eye(found.r1.size) if fault == "too large" else 1.01 * found.r1.dense()
        return replace(found, r1=rotation.learned(matrix), learned="learning did this")

    monkeypatch.setattr(learned, "learn", learn)
    wanted = (*settings(models), "rotate.r2=false")
    run = quantizing.quantize(source, "w4-gptq-rotated-learned", tmp_path / "out", *wanted)
    plain = quantizing.quantize(source, "w4-gptq-rotated", tmp_path / "plain", *wanted)
    notes = "\n".join(run.summary.notes)
    assert "rotate: what was learned is left out: " in notes and "did this" not in notes
    assert ("too large for the float16" if fault == "too large" else "gives other outputs") in notes
    made = [load_file(one.out / "model.safetensors") for one in (run, plain)]
    assert made[0].keys() == made[1].keys()
    assert all(np.array_equal(made[0][key], made[1][key]) for key in made[0])


def test_learned_rotations_see_the_rounding_of_inputs(models: Path) -> None:
    """Of W4A4 the noise of rounded inputs falls below the start's and that of a rotation which
    weights alone were looked at for: measured by the roundings of `qtool eval` on other tokens."""
    from qtool.messages.progress import Progress
    from qtool.methods import activations
    from qtool.transforms import learned

    source = checkpoint(models, "llama")
    recipe = recipes.load("w4a4-rotated", ["rotate.r4=false"])
    assert isinstance(recipe, recipes.Recipe) and recipe.activations is not None
    four = activations.integers(4, -1, True)
    random = np.random.default_rng(1)
    tokens, others = random.integers(3, arch_models.VOCABULARY, (2, 4, 40), dtype=np.int64)
    norm = torch.nn.functional.rms_norm
    made: dict[str, float] = {}
    for kind in ("start", "weights", "both"):
        view = rotated.untied(source)
        found = rotate.prepare(view, recipe.rotate, quiet)
        schemes = {t.name: t.scheme for t in make_plan(recipe, view).quantized if t.scheme}
        if kind != "start":
            rounded = recipe.activations if kind == "both" else None
            found = learned.learn(
                view, found, schemes, tokens, 20, 1.0, Progress(quiet=True), rounded
            )
        assert found.r1 is not None
        matrix = torch.from_numpy(found.r1.dense()).float()
        skeleton = Skeleton.open(source)
        stream = skeleton.embed(others)
        lost = 0.0
        for index in range(skeleton.count):
            block = skeleton.block(index)
            x = norm(stream.hidden[0], stream.hidden[0].shape[-1:], eps=1e-6) @ matrix
            lost += float((four.apply(x) - x).square().mean())
            for number, hidden in enumerate(stream.hidden):
                stream.hidden[number] = block.run(hidden, stream.calls[index][number])
        made[kind] = lost
    assert made["both"] < 0.97 * min(made["start"], made["weights"]), made
