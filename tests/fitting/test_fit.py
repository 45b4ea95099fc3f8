"""`qtool fit`: sizes that are kept, losses that come true, and what goes wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.fitting import fit as module
from qtool.fitting.fit import fit
from qtool.messages.progress import Progress
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.schemas import text as schema_text
from support.fitting.fitting_runs import SMALL, fitted, request, tiny
from support.gguf import gguf_from_hf, gguf_models
from support.places import ROOT
from support.runs import quantizing
from support.runs.quantizing import Call

__all__ = ["tiny"]


def test_from_a_size_to_a_file(tiny: Path, tmp_path: Path, call: Call) -> None:
    """What the commands print, and that the file is as large as it was to be."""
    recipe, costs = tmp_path / "mine.yaml", tmp_path / "costs.json"
    asked = ("fit", tiny, "--size", "1MB", "--costs", costs, "-o", recipe, *SMALL)
    made = call(*asked, "--json")
    assert made.status == 0, made.err
    found = json.loads(made.out)
    assert 980_000 < found["size_bytes"] <= 1_000_000
    assert found["tokens"] == 256 and not found["kept"]
    out = tmp_path / "out.gguf"
    run = call("quantize", tiny, "--recipe", recipe, "-o", out, *SMALL, "--json")
    assert run.status == 0, run.err
    assert 0.98e6 < out.stat().st_size <= 1.0e6
    types = {one["name"]: one["type"] for one in found["chosen"]}
    inspected = json.loads(call("inspect", out, "--json").out)
    stored = {one["name"]: one["dtype"] for one in inspected["tensors"] if one["name"] in types}
    assert stored == types
    chosen = load(str(recipe))
    assert isinstance(chosen, GgufRecipe)
    said = call("inspect", out).out
    done = "awq, then gptq (guided 0.5, yaqa 16)"
    assert f": {done}, with {len(chosen.overrides)} overrides\ncalibrated on: 4 samples" in said
    # Another size out of the same costs.
    other = call("fit", tiny, "--bits", 5, "--costs", costs, "-o", tmp_path / "b.yaml", *SMALL)
    assert other.status == 0 and "costs taken from" in other.err
    assert "5.0" in other.out or "4.99" in other.out
    command = f"next: qtool quantize {tiny} --recipe {tmp_path / 'b.yaml'}"
    assert f"{command} --samples=4 --length=64" in other.out


def test_what_it_says_has_the_schema(tiny: Path, tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    found = fitted(tiny, tmp_path / "a.yaml", bits=4.5)
    Draft202012Validator(json.loads(schema_text("fit"))).validate(found.json())


def test_more_bytes_lose_less_and_fitting_beats_the_recipe(tiny: Path, tmp_path: Path) -> None:
    """At the recipe's own size it loses less than the recipe does, by the same costs."""
    costs = tmp_path / "costs.json"
    losses = [
        fitted(tiny, tmp_path / f"{bits}.yaml", bits=bits, costs=costs).loss
        for bits in (3.5, 4.5, 5.5)
    ]
    assert losses == sorted(losses, reverse=True)
    first = fitted(tiny, tmp_path / "first.yaml", bits=4.5, costs=costs)
    made, before = first.before
    size = made.size_bytes
    assert before is not None
    same = fitted(tiny, tmp_path / "same.yaml", size_bytes=size, costs=costs)
    assert same.loss < before
    assert same.made.size_bytes <= size


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_measured_is_what_it_loses(
    whole: bool, tiny: Path, tmp_path: Path, call: Call
) -> None:
    """Of two blocks, or the whole shipped model: over the text that costs were measured on, the KL
    divergence of the file is near to what was estimated."""
    model = "tiny" if whole else tiny
    recipe, costs = tmp_path / "mine.yaml", tmp_path / "costs.json"
    text = ROOT / "LICENSE"
    sets = ("--calibration", text, "--samples", 16, "--length", 128)
    for bits in (4.2, 5.2):
        recipe = tmp_path / f"{bits}.yaml"
        made = call("fit", model, "--recipe", "q4_k_m", "--set", "importance=true", "--bits", bits,
                    "--costs", costs, "-o", recipe, *sets, "--json")  # fmt: skip
        assert made.status == 0, made.err
        out = tmp_path / f"{bits}.gguf"
        run = call("quantize", model, "--recipe", recipe, "-o", out, *sets)
        assert run.status == 0, run.err
        said = call("eval", out, "--against", model, "--text", text, "--windows", 16,
                    "--length", 128, "--json")  # fmt: skip
        divergence = json.loads(said.out)["kld"]["mean"]
        assert json.loads(made.out)["loss"] == pytest.approx(divergence, rel=0.3)


def test_no_loss_is_more_than_unrelated_predictions_differ_by(tiny: Path, tmp_path: Path) -> None:
    """Where the sum of losses is beyond that; files of costs that lack it have sums."""
    file = tmp_path / "costs.json"
    asked: dict[str, Any] = {"types": "q2_k,q3_k", "costs": file}
    first = fitted(tiny, tmp_path / "a.yaml", bits=3, **asked)
    kept = json.loads(file.read_text())
    assert first.unrelated == kept["unrelated"] > 1 and first.loss < first.unrelated
    kept["unrelated"] = first.loss / 2
    file.write_text(json.dumps(kept))
    bounded = fitted(tiny, tmp_path / "b.yaml", bits=3, **asked)
    assert bounded.loss == kept["unrelated"]
    assert any("is not to be relied on" in line for line in bounded.lines(["qtool"]))
    assert bounded.chosen == first.chosen
    del kept["unrelated"]
    file.write_text(json.dumps(kept))
    old = fitted(tiny, tmp_path / "c.yaml", bits=3, **asked)
    assert old.loss == first.loss and old.unrelated is None
    assert not any("is not to be relied on" in line for line in old.lines(["qtool"]))


def test_a_gguf_file_costs_what_its_checkpoint_does(tiny: Path, tmp_path: Path, call: Call) -> None:
    """Rows of q and k lie in another order there."""
    file = tmp_path / "f32.gguf"
    assert call("quantize", tiny, "--recipe", "f32", "-o", file).status == 0
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    fitted(tiny, tmp_path / "a.yaml", bits=4.5, costs=here)
    fitted(file, tmp_path / "b.yaml", bits=4.5, costs=there)
    left, right = (json.loads(path.read_text())["losses"] for path in (here, there))
    assert left.keys() == right.keys() and len(left) == 15
    for name, types in left.items():
        for kind, loss in types.items():
            assert right[name][kind] == pytest.approx(loss, rel=2e-3), (name, kind)


def test_what_the_recipe_says_stays(tiny: Path, tmp_path: Path) -> None:
    sets = ["importance=true", "embedding_type=q8_0", "overrides=[{match: attn_v, type: q6_k}]"]
    found = fitted(tiny, tmp_path / "a.yaml", bits=5.5, sets=sets)
    names = set(found.chosen)
    assert "token_embd.weight" not in names and not any("attn_v" in name for name in names)
    recipe = load(str(tmp_path / "a.yaml"))
    assert isinstance(recipe, GgufRecipe) and recipe.embedding_type == "q8_0"
    assert recipe.overrides[0].match == "attn_v" and recipe.importance
    (note,) = found.notes
    assert note.endswith(
        "not chosen: token_embd.weight q8_0, blk.0.attn_v.weight q6_k, blk.1.attn_v.weight q6_k"
    )


def test_more_than_all_types_have_is_said(tiny: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    found = fitted(tiny, tmp_path / "a.yaml", size_bytes=2_000_000, costs=costs)
    assert {one.name for one in found.chosen.values()} == {"Q6_K"}
    (note,) = found.notes
    assert f"largest type that there is to choose, which comes to {found.made.size_bytes:,}" in note
    enough = fitted(tiny, tmp_path / "c.yaml", size_bytes=found.made.size_bytes, costs=costs)
    assert enough.made == found.made and not enough.notes
    least = found.made.size_bytes - 100_000
    assert not fitted(tiny, tmp_path / "b.yaml", size_bytes=least, costs=costs).notes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "give either --size"),
        (("--size", "1MB", "--bits", 4), "give either --size"),
        (("--size", "many"), "no size"),
        (("--bits", 4, "--types", "q4_k,q4_k_m"), "did you mean Q4_K"),
        (("--bits", 4, "--types", "f16"), "no type that matrices are quantized to"),
        (("--bits", 4, "--recipe", "w4g128-awq"), "whose matrices all have the same bits"),
        (("--bits", 4, "--recipe", "w4g128-gptq", "--types", "4,q8_0"), "no number of bits"),
        (("--bits", 4, "--recipe", "w8a8-dynamic"), "rounds inputs, too"),
        (("--bits", 4, "--recipe", "f16"), "plain numbers"),
        (("--bits", 4, "--set", "transforms=[rotate]"), "rotates the network"),
        (("--bits", 4, "--recipe", "q4_k_m", "--types", "iq2_xxs"), "encoded without importance"),
        (("--bits", 4, "--costs", "/dev/null/x.json"), "/dev/null/x.json: cannot be"),
        (("--bits", 1), "the smallest artifact has"),
        (("--size", "700KB", "--types", "q4_k,q6_k"), "name smaller --types"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    given: tuple[object, ...], said: str, tiny: Path, tmp_path: Path, call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before anything is measured; nothing is left."""
    monkeypatch.setattr(module, "workspace", None)
    found = call("fit", tiny, *given, "-o", tmp_path / "out.yaml", *SMALL)
    assert found.status in (1, 2) and said in found.err, found.err
    assert found.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_costs_of_something_else_are_refused(tiny: Path, tmp_path: Path, call: Call) -> None:
    costs = tmp_path / "costs.json"
    fitted(tiny, tmp_path / "a.yaml", bits=4.5, costs=costs)
    kept = costs.read_text()
    out = ("--costs", costs, "-o", tmp_path / "b.yaml")
    asked = ("fit", tiny, "--bits", 5, "--recipe", "q4_k_m", "--types", "q4_k,q5_k", *out, *SMALL)
    found = call(*asked)
    assert found.status == 1 and "importance was true, is false" in found.err
    for sets, types, said in (
        ("embedding_type=q8_0", "q2_k,iq4_xs", "IQ4_XS not among --types"),
        ("calibration.seed=1", "q2_k,q3_k", "calibration text: seed was 0, is 1"),
        ("calibration.length=32", "q2_k,q3_k", "calibration text: length was 64, is 32"),
    ):
        other = ("--set", "importance=true", "--set", sets, "--types", types)
        more = () if "length" in sets else ("--length", 64)
        found = call("fit", tiny, "--bits", 5, "--recipe", "q4_k_m", *other, *out, "--samples", 4,
                     *more)  # fmt: skip
        assert found.status == 1 and said in found.err, found.err
    lies = {
        "[]": "not a file of costs as `qtool fit --costs` writes it (expected a JSON object",
        "{}": "not a file of costs",
        '{"of": {}, "tokens": 1, "losses": {"a": {"Q4_K": -1}}}': "not a file of costs",
        '{"of": {}, "tokens": 1, "losses": {"a": {"Q4_K": true}}}': "not a file of costs",
        '{"of": {}, "tokens": 1, "losses": {"a": 3}}': "not a file of costs",
        '{"of": {}, "tokens": Infinity, "losses": {}}': "not a file of costs",
        '{"of": {}, "tokens": 1, "losses": {"a": {"Q4_K": 1e999}}}': "not a file of costs",
        '{"of": {}, "tokens": 1, "losses": {"a": {"Q4_K": 1' + "0" * 400 + "}}}": "not a file of",
        '{"of": 5, "tokens": 1, "losses": {}}': "not a file of costs",
        "{": "not a file of costs",
    }
    for lie, said in lies.items():
        costs.write_text(lie)
        found = call(*asked)
        assert found.status == 1 and said in found.err and "costs.json" in found.err, lie
    assert not (tmp_path / "b.yaml").exists()
    costs.write_text(kept)


def test_losses_are_those_of_all_rows(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """What a few pieces of a tensor tell is near to what all of it does."""
    from qtool.gradients import sampled

    every, some = tmp_path / "every.json", tmp_path / "some.json"
    fitted(tiny, tmp_path / "a.yaml", bits=4.5, costs=every)
    monkeypatch.setattr(sampled, "_PIECE", 1 << 11)
    monkeypatch.setattr(sampled, "SAMPLED", 1 << 15)
    monkeypatch.setattr(sampled, "OF_TABLES", 1 << 17)
    fitted(tiny, tmp_path / "b.yaml", bits=4.5, costs=some)
    left, right = (json.loads(path.read_text())["losses"] for path in (every, some))
    ratios = [
        right[name][kind] / loss for name, types in left.items() for kind, loss in types.items()
    ]  # fmt: skip
    assert any(ratio != 1 for ratio in ratios)
    assert 0.8 < np.median(ratios) < 1.25 and max(ratios) < 2 and min(ratios) > 0.5


def test_experts_are_weighed_by_the_tokens_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture through the whole command: its experts are one tensor of each kind a layer."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    model = quantizing.add_tokenizer(gguf_models.build("qwen3-moe", tmp_path / "model"))
    text = quantizing.text_file(tmp_path / "text.txt", 6000)
    sets = [f"calibration.source={text}"]
    asked = request(model, tmp_path / "a.yaml", bits=5.0, recipe="q4_0", sets=sets,
                    types="q4_0,q5_0,q8_0")  # fmt: skip
    found = fit(asked, Progress(quiet=True))
    experts = [name for name in found.chosen if "_exps" in name]
    assert len(experts) == 3 * 2 and not found.kept
    assert found.made.bits_per_weight <= 5.0


@pytest.mark.parametrize(
    "recipe", [pytest.param("q4_k_m", marks=pytest.mark.slow), "q4_0", "q4_k_m-awq-gptq"]
)
def test_usual_types_go_with_every_recipe(recipe: str, tiny: Path, tmp_path: Path) -> None:
    """What llama.cpp makes with importance alone is not chosen where none is measured."""
    found = fitted(tiny, tmp_path / "mine.yaml", bits=5, recipe=recipe, sets=[], types=None)
    names = {one.name for one in found.chosen.values()}
    assert ("IQ2_S" in names or "IQ3_XXS" in names) <= (recipe == "q4_k_m-awq-gptq")


@pytest.mark.slow
def test_an_exact_size_is_kept(tiny: Path, tmp_path: Path, call: Call) -> None:
    """With what the file tells of its calibration, and of AWQ's scales."""
    for number, sets in enumerate(("importance=true", "transforms=[awq]")):
        recipe, out = tmp_path / f"{number}.yaml", tmp_path / f"{number}.gguf"
        asked = ("--set", sets, "--types", "q3_k,q4_k,q5_k,q6_k", *SMALL)
        costs = ("--costs", tmp_path / f"{number}.json")
        first = call("fit", tiny, "--recipe", "q4_k_m", "--bits", 4.6, "-o", recipe, *costs, *asked,
                     "--json")  # fmt: skip
        assert first.status == 0, first.err
        size = json.loads(first.out)["size_bytes"]
        again = tmp_path / f"{number}-again.yaml"
        exact = call("fit", tiny, "--recipe", "q4_k_m", "--size", size, "-o", again, *costs, *asked)
        assert exact.status == 0, exact.err
        assert call("quantize", tiny, "--recipe", again, "-o", out, *SMALL).status == 0
        assert size - 6000 < out.stat().st_size <= size


def test_a_matrix_that_a_type_cannot_hold(tiny: Path, tmp_path: Path) -> None:
    """One weight far beyond float16's scales: types that lose it are left out, and said so."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    model.mkdir()
    for file in tiny.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tensors = {name: one.float() for name, one in load_file(model / "model.safetensors").items()}
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 3e7
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    costs = tmp_path / "costs.json"
    found = fitted(model, tmp_path / "a.yaml", bits=5.5, costs=costs, types="q4_k,q5_k,q6_k,q8_0")
    kept = json.loads(costs.read_text())["losses"]
    lost = {kind for kind, loss in kept["blk.0.ffn_down.weight"].items() if loss is None}
    assert lost and found.chosen["blk.0.ffn_down.weight"].name not in lost
    assert np.isfinite(found.loss)
    again = fitted(model, tmp_path / "b.yaml", bits=5.5, costs=costs, types="q4_k,q5_k,q6_k,q8_0")
    assert again.loss == found.loss


def test_a_gguf_file_is_not_scaled_and_not_quantized_twice(tmp_path: Path, call: Call) -> None:
    """What `quantize` would refuse is refused before anything is measured."""
    for recipe in ("f16", "q8_0"):
        made = call("quantize", "tiny", "--recipe", recipe, "-o", tmp_path / f"{recipe}.gguf")
        assert made.status == 0
    mine = tmp_path / "mine.yaml"
    asked = ("--bits", 5, "-o", mine, "--types", "q4_k,q5_k", *SMALL)
    found = call("fit", tmp_path / "f16.gguf", *asked)
    assert found.status == 1 and "leave that out (--set transforms=[])" in found.err
    plain = ("--recipe", "q4_k_m", *asked[:4], "--types", "q4_k,q5_k", *SMALL)
    found = call("fit", tmp_path / "q8_0.gguf", *plain)
    assert found.status == 1 and "is quantized already" in found.err
    found = call("fit", tmp_path / "q8_0.gguf", *plain, "--requantize")
    assert found.status == 0, found.err
    assert "rounds without looking at text" in found.err
    words = f"--recipe {mine} --requantize"
    assert f"next: qtool quantize {tmp_path / 'q8_0.gguf'} {words}\n" in found.out


def test_types_that_nobody_asked_for_are_said(tmp_path: Path, monkeypatch: Any) -> None:
    gguf_from_hf.no_vocabulary(monkeypatch)
    model = quantizing.add_tokenizer(gguf_models.build("llama", tmp_path / "model"))
    text = quantizing.text_file(tmp_path / "text.txt", 6000)
    sets = [f"calibration.source={text}", "importance=true"]
    asked = request(model, tmp_path / "a.yaml", bits=6.5, sets=sets, types="q4_k,q6_k")
    found = fit(asked, Progress(quiet=True))
    assert len(found.notes) == 1 and "as with llama.cpp, Q5_0, Q8_0 in their" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "llama4",
            "rows of 2 matrices (blk.0.ffn_down.weight f16, blk.2.ffn_down.weight f16) ",
        ),
        ("gpt-oss-mxfp4", "6 matrices (blk.0.ffn_down_exps.weight mxfp4, "),
    ],
)
def test_what_is_not_chosen_is_said_for_what_it_is(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_from_hf.no_vocabulary(monkeypatch)
    model = quantizing.add_tokenizer(gguf_models.build(name, tmp_path / "model"))
    found = fitted(model, tmp_path / "a.yaml", bits=7.5, recipe="q4_0", types="q4_0,q8_0")
    assert [note for note in found.notes if note.startswith(said)], found.notes
    assert not any("as the recipe itself says" in note for note in found.notes)
