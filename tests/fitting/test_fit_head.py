"""`qtool fit` of what lies outside of the blocks: a head's bits, and an embedding's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from qtool.fitting.outside import kept_keys, remains, sensitivities_of
from qtool.gradients.before import _chances
from qtool.gradients.sampled import by_weight
from qtool.gradients.sensitivity import Sensitivities, Sensitivity
from qtool.planned import Planned
from qtool.recipe.recipe import Recipe, load
from qtool.scheme import Dense
from support.fitting.fitting_runs import SMALL, widths
from support.runs.quantizing import Call, first_blocks_of_tiny

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_blocks_of_tiny(tmp_path_factory.mktemp("tied") / "model", 1)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network with a head of its own."""
    model = first_blocks_of_tiny(tmp_path_factory.mktemp("untied") / "model", 1)
    tensors = load_file(model / "model.safetensors")
    tensors[f"{HEAD}.weight"] = tensors[f"{EMBEDDING}.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(config))
    return model


def fitted(call: Call, model: Path, out: Path, *given: object) -> dict[str, Any]:
    found = call("fit", model, "-o", out, *given, *SMALL, "--json")
    assert found.status == 0, found.err
    return dict(json.loads(found.out))


def test_mlx_has_bits_for_both(untied: Path, tmp_path: Path, call: Call) -> None:
    """Those that are stored are those that were chosen; less for the table that costs less."""
    mine, out, costs = tmp_path / "mine.yaml", tmp_path / "out", tmp_path / "costs.json"
    asked = ("--recipe", "w4g64-mlx-rtn", "--types", "4,8", "--bits", 6.6, "--costs", costs)
    found = fitted(call, untied, mine, *asked)
    chosen = {one["name"]: int(one["type"]) for one in found["chosen"]}
    losses = json.loads(costs.read_text())["losses"]
    assert losses[HEAD]["4"] > losses[EMBEDDING]["4"] > losses[EMBEDDING]["8"] > 0
    assert chosen[HEAD] > chosen[EMBEDDING] and not found["kept"] and not found["notes"]
    recipe = load(str(mine))
    assert isinstance(recipe, Recipe)
    assert (recipe.mlx.head, recipe.mlx.embedding) == (chosen[HEAD], chosen[EMBEDDING])
    run = call("quantize", untied, "--recipe", mine, "-o", out, "--json")
    assert run.status == 0, run.err
    assert json.loads(run.out)["bits_per_weight"] == pytest.approx(found["bits_per_weight"])
    stored = widths(out)
    assert (stored[HEAD], stored[EMBEDDING]) == (chosen[HEAD], chosen[EMBEDDING])


def test_an_embedding_that_is_the_head_costs_both(
    tied: Path, untied: Path, tmp_path: Path, call: Call
) -> None:
    """What the two cost that are alike."""
    kept = []
    for number, model in enumerate((tied, untied)):
        costs, mine = tmp_path / f"{number}.json", tmp_path / f"{number}.yaml"
        asked = ("--recipe", "w4g64-mlx-rtn", "--bits", 6, "--costs", costs)
        found = fitted(call, model, mine, *asked)
        kept.append(json.loads(costs.read_text())["losses"])
        recipe = load(str(mine))
        assert isinstance(recipe, Recipe)
        if model == tied:
            chosen = {one["name"]: int(one["type"]) for one in found["chosen"]}
            assert recipe.mlx.head == chosen[EMBEDDING]
            assert recipe.mlx.embedding == 4  # as the recipe had it: of no tensor
    for width, loss in kept[0][EMBEDDING].items():
        assert loss == pytest.approx(kept[1][EMBEDDING][width] + kept[1][HEAD][width], rel=1e-6)


def test_gptq_sweeps_an_embedding_as_a_head_alone(
    tied: Path, untied: Path, tmp_path: Path, call: Call
) -> None:
    """Into GGUF. Of what one loses that is the head, that part is as by GPTQ; not what it loses
    where rows are looked up."""
    losses: dict[str, dict[str, dict[str, float]]] = {}
    few = ("--recipe", "q4_0", "--set", "importance=true", "--types", "q4_k,q8_0", "--bits", 6)
    for name, model in (("own", untied), ("tied", tied)):
        costs = tmp_path / f"{name}.json"
        asked = (*few, "--set", "method=gptq", "--costs", costs)
        fitted(call, model, tmp_path / f"{name}.yaml", *asked)
        losses[name] = json.loads(costs.read_text())["losses"]
    for kind, loss in losses["own"]["token_embd.weight"].items():
        head = losses["own"]["output.weight"][kind]  # of rounding: what remains is reckoned later
        found = losses["tied"]["token_embd.weight"][kind]
        assert found == pytest.approx(loss + head / 6, rel=1e-6)
    asked = (*few, *SMALL, "--costs", tmp_path / "tied.json")
    said = call("fit", tied, "-o", tmp_path / "new.yaml", *asked)
    assert said.status == 1 and "embedding that is the head was gptq, is not set" in said.err


@pytest.mark.parametrize("by", ["set", "file"])
def test_what_a_user_says_of_them_stays(by: str, tied: Path, tmp_path: Path, call: Call) -> None:
    given: tuple[object, ...] = ("w4g64-mlx-rtn", "--set", "mlx.head=8")
    if by == "file":
        own = tmp_path / "own.yaml"
        shipped = "method: rtn\nformat: mlx\nweights: {bits: 4, group_size: 64, symmetric: false}\n"
        own.write_text(f"{shipped}mlx: {{head: 8}}\n")
        given = (own,)
    mine = tmp_path / "mine.yaml"
    found = fitted(call, tied, mine, "--bits", 7, "--recipe", *given)
    assert EMBEDDING not in {one["name"] for one in found["chosen"]}
    assert found["notes"] == [
        f"as the recipe itself says, and not chosen: {EMBEDDING}.weight 8 bits"
    ]
    recipe = load(str(mine))
    assert isinstance(recipe, Recipe) and recipe.mlx.head == 8


def test_a_quantized_head_of_gptq_may_have_its_bits_chosen(
    untied: Path, tmp_path: Path, call: Call
) -> None:
    """Where an override quantizes it and leaves bits open; else it is dense, or as it says."""
    cases = (("open", "group_size: 64", 10.5), ("pinned", "bits: 4", 10.5), ("none", None, 12))
    for name, patch, bits in cases:
        own = f"[{{match: lm_head, weights: {{{patch}}}}}]" if patch else "[]"
        mine = tmp_path / f"{name}.yaml"
        asked = (
            "--recipe",
            "w3g128-rtn",
            "--set",
            f"overrides={own}",
            "--bits",
            bits,
        )
        found = fitted(call, untied, mine, *asked)
        chosen = {one["name"]: int(one["type"]) for one in found["chosen"]}
        assert (HEAD in chosen) == (name == "open") and EMBEDDING not in chosen
        assert not found["kept"]
        if name == "pinned":
            assert found["notes"][0].endswith(f"not chosen: {HEAD}.weight 4 bits")
        if name == "open":
            out = tmp_path / "out"
            run = call("quantize", untied, "--recipe", mine, "-o", out)
            assert run.status == 0, run.err
            assert widths(out)[HEAD] == chosen[HEAD] == 8


def test_shipped_recipes_only_say_where_to_begin() -> None:
    recipe = load("w4g64-mlx-rtn")
    assert isinstance(recipe, Recipe)
    assert kept_keys(recipe, False, ["weights.bits=3"]) == frozenset()
    assert kept_keys(recipe, False, ["mlx.head=6"]) == {"head"}
    assert kept_keys(recipe, False, ["mlx={head: 6, embedding: 4}"]) == {"head", "embedding"}
    assert kept_keys(recipe, True, []) == {"head", "embedding"}


def test_what_was_not_measured_of_a_way_is_not_free() -> None:
    planned = Planned(f"{EMBEDDING}.weight", (6, 2), "F32", Dense("embedding"), (), None)
    one = Sensitivity(np.full(6, 1 / 6), np.ones(2), 12)
    assert sensitivities_of(planned, Sensitivities(tables={planned.name: one}), False) == [one]
    assert sensitivities_of(planned, Sensitivities(tables={planned.name: one}), True) == []
    both = Sensitivities(tables={planned.name: one}, head=one)
    assert sensitivities_of(planned, both, True) == [one, one]
    other = Sensitivity(np.full(5, 0.2), np.ones(2), 12)  # of another shape
    assert sensitivities_of(planned, Sensitivities(tables={planned.name: other}), False) == []


def test_rows_are_likely_as_often_as_they_are_asked_for() -> None:
    found = _chances(np.array([6, 1, 1, 0, 0]))
    np.testing.assert_allclose(found, [0.75 * 6 / 8, 0.75 / 8, 0.75 / 8, 0.125, 0.125])
    assert _chances(np.array([3, 1])).tolist() == [0.75, 0.25]
    assert _chances(np.array([1, 1, 0])).tolist() == [0.25, 0.25, 0.5]


def test_pieces_speak_for_what_they_weigh(monkeypatch: pytest.MonkeyPatch) -> None:
    from qtool.gradients import sampled

    rows = np.random.default_rng(0).pareto(1.1, 4000)
    monkeypatch.setattr(sampled, "_PIECE", 64)
    every = by_weight(rows, 16)
    assert [first for first, _, _ in every] == list(range(0, 4000, 4))
    np.testing.assert_allclose([weight for _, _, weight in every], rows.reshape(-1, 4).sum(1))
    monkeypatch.setattr(sampled, "OF_TABLES", 64 * 100)
    some = by_weight(rows, 16)
    assert 10 < len(some) < 100
    assert sum(weight for _, _, weight in some) == pytest.approx(rows.sum())
    heaviest = int(rows.argmax()) // 4 * 4
    assert heaviest in [first for first, _, _ in some]
    none = by_weight(np.zeros(4000), 16)
    assert {weight for _, _, weight in none} == {0.0}


@pytest.mark.slow
def test_what_comes_after_rounding_is_reckoned_with(
    untied: Path, tmp_path: Path, call: Call
) -> None:
    """AWQ and GPTQ make errors in blocks smaller, and none of an embedding, which then has more
    bits; what is said is of rounding to nearest."""
    tables: dict[str, int] = {}
    for name in ("rtn", "awq-gptq"):
        asked = ("--recipe", f"w4g64-mlx-{name}", "--types", "3,4,5,6,8", "--bits", 5)
        found = fitted(call, untied, tmp_path / f"{name}.yaml", *asked)
        chosen = {one["name"]: one for one in found["chosen"]}
        tables[name] = int(chosen[EMBEDDING]["type"])
        assert found["loss"] == pytest.approx(sum(one["loss"] for one in chosen.values()))
    assert tables["awq-gptq"] > tables["rtn"]


@pytest.mark.parametrize(
    ("recipe", "block", "head"),
    [
        ("w4g64-mlx-rtn", 1, 1),
        ("w4g64-gptq", 1 / 4, 1 / 4),
        ("w4a16-ct-awq", 1 / 4, 1),
        ("w4g64-mlx-awq-gptq", 1 / 6, 1 / 4),
    ],
)
def test_what_methods_leave(recipe: str, block: float, head: float) -> None:
    loaded = load(recipe)
    assert isinstance(loaded, Recipe)
    cases = (("model.layers.0.mlp.up_proj", 0, block), (HEAD, None, head), (EMBEDDING, None, 1))
    for name, number, share in cases:
        planned = Planned(f"{name}.weight", (6, 2), "F32", loaded.scheme, (), number)
        assert remains(loaded, planned) == share
