"""The choice of types: against all choices there are, and as a recipe's text."""

import itertools

import numpy as np
import pytest

from qtool.fitting.allocate import Candidate, allocate
from qtool.fitting.recipe_text import gguf_text
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load, parse


def problem(seed: int) -> list[list[Candidate]]:
    rng = np.random.default_rng(seed)
    return [
        [
            Candidate(str(number), int(rng.integers(1, 60)), float(rng.integers(0, 40)))
            for number in range(rng.integers(1, 5))
        ]
        for _ in range(rng.integers(1, 6))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_that_fits_loses_less(seed: int) -> None:
    """Sizes below the number of steps are counted exactly."""
    units = problem(seed)
    sizes = [sum(c.nbytes for c in choice) for choice in itertools.product(*units)]
    for budget in (min(sizes) - 1, min(sizes), int(np.median(sizes)), max(sizes), max(sizes) + 9):
        fitting = [
            sum(c.loss for c in choice)
            for choice, size in zip(itertools.product(*units), sizes, strict=True)
            if size <= budget
        ]
        found = allocate(units, budget)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert all(one in unit for one, unit in zip(found, units, strict=True))
        assert sum(one.nbytes for one in found) <= budget
        assert sum(one.loss for one in found) == min(fitting)


def test_large_sizes_are_rounded_up_and_never_exceeded() -> None:
    rng = np.random.default_rng(0)
    units = [
        [
            Candidate(str(n), int(3e6 * (n + 2) * rng.uniform(0.9, 1.1)), 4.0**-n * rng.uniform())
            for n in range(6)
        ]
        for _ in range(200)
    ]
    budget = 200 * 3_000_000 * 4
    found = allocate(units, budget)
    assert found is not None
    used = sum(one.nbytes for one in found)
    assert budget * 0.997 < used <= budget


def test_of_equal_losses_the_smaller_is_taken() -> None:
    units = [[Candidate("large", 9, 1.0), Candidate("small", 3, 1.0)]]
    assert allocate(units, 100) == [units[0][1]]


def test_the_text_says_what_was_chosen_and_what_the_recipe_said() -> None:
    sets = ["method=gptq", "transforms=[awq]", "overrides=[{match: attn_k_b, type: q8_0}]"]
    base = load("q4_k_m", sets)
    assert isinstance(base, GgufRecipe)
    types = {
        "token_embd.weight": "Q4_K",
        "output.weight": "Q6_K",
        "blk.0.attn_k.weight": "Q5_K",
        "blk.10.attn_k.weight": "Q5_K",
        "blk.1.attn_k.weight": "IQ4_XS",
        "dense_2.weight": "Q8_0",
    }
    text = gguf_text(base, {}, "for a test", types)
    assert text.startswith("# for a test\n")
    found = parse(text, "mine.yaml", "mine")
    assert isinstance(found, GgufRecipe)
    for key in ("type", "method", "transforms", "importance"):
        assert getattr(found, key) == getattr(base, key), key
    assert (found.embedding_type, found.output_type) == ("q4_k", "q6_k")
    options = found.options
    for name, kind in types.items():
        if name.startswith(("blk.", "dense")):
            override = options.override_of(name)
            assert override is not None and override.type is not None
            assert override.type.name == kind, name
    # Neither other layers nor other tensors.
    for name in ("blk.11.attn_k.weight", "blk.0.attn_q.weight", "blk.0.attn_k_norm.weight"):
        assert options.override_of(name) is None, name
    own = options.override_of("blk.3.attn_k_b.weight")
    assert own is not None and own.type is not None and own.type.name == "Q8_0"
    assert "blk\\.(0|10)\\.attn_k\\.weight" in text


@pytest.mark.parametrize("stored", ["Q4_K", "F16"])
def test_the_table_of_embeddings_per_layer_keeps_its_type(stored: str) -> None:
    """`embedding_type` is of both tables, as llama-quantize has it."""
    base = load("q4_k_m")
    assert isinstance(base, GgufRecipe)
    name = "per_layer_token_embd.weight"
    for types, expected in (({}, None), ({"token_embd.weight": "Q8_0"}, stored)):
        text = gguf_text(base, {name: stored}, "for a test", types)
        found = parse(text, "mine.yaml", "mine")
        assert isinstance(found, GgufRecipe)
        override = found.options.override_of(name)
        said = None if override is None or override.type is None else override.type.name
        assert said == expected
