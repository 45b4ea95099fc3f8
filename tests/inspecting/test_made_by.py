"""What `inspect` says of a recorded recipe, and of notes that differ by the layer alone."""

from typing import Any

import pytest

from qtool.inspecting.inspect import _recorded
from qtool.record import made_by


@pytest.mark.parametrize(
    "recipe, said",
    [
        ({"name": "a", "method": "rtn", "transforms": []}, "recipe a"),
        ({"name": "a", "method": "gptq"}, "recipe a: gptq"),
        (
            {"name": "a", "method": ["gptq"], "transforms": ["awq"]},
            "recipe a: awq, then gptq",
        ),
        (
            {"name": "a", "method": ["awq", "gptq"], "gptq": {"guided": 0.5, "yaqa": 16}},
            "recipe a: awq, then gptq (guided 0.5, yaqa 16)",
        ),
        (
            {"name": "a", "method": ["awq"], "gptq": {"guided": 0.5}, "overrides": [{}]},
            "recipe a: awq, with 1 override",
        ),
        ({"name": "a", "method": "gptq", "gptq": {"guided": 0.0, "yaqa": 0}}, "recipe a: gptq"),
        ({"name": "a", "method": 3, "gptq": [], "overrides": 7, "transforms": [1]}, "recipe a"),
        ({"name": "a", "method": "gptq", "gptq": {"yaqa": "many"}}, "recipe a: gptq"),
        (
            {"name": "a", "method": ["awq", "gptq"], "transforms": ["awq"]},
            "recipe a: awq, then gptq",
        ),
        *(
            ({"name": "a", "method": "gptq", "gptq": {"yaqa": odd}}, "recipe a: gptq")
            for odd in (10**400, True, float("nan"), float("inf"), -1)
        ),
        (
            {"name": "a", "method": "gptq", "gptq": {"yaqa": 1234567}},
            "recipe a: gptq (yaqa 1234567)",
        ),
        ({"name": 1}, None),
        ([], None),
        (None, None),
    ],
)
def test_recorded_recipe(recipe: object, said: str | None) -> None:
    assert made_by(recipe) == said


def test_notes_are_lines_and_those_of_all_layers_one() -> None:
    record: dict[str, Any] = {
        "recipe": {"name": "a", "method": "gptq"},
        "calibration": {"samples": 4},
        "notes": [*(f"x.{n}.y: 3 of 8 channels are zero" for n in range(12)), "another\x1b"],
    }
    assert list(_recorded(record)) == [
        ("made by", "recipe a: gptq"),
        ("calibration.samples", "4"),
        ("note", "x.*.y: 3 of 8 channels are zero (12 layers)"),
        ("note", "another\\x1b"),
    ]


def test_what_is_done_beside_rounding_weights_is_said() -> None:
    recipe = {"name": "a", "method": "none", "activations": {"bits": 8}, "kv_cache": "fp8"}
    assert list(_recorded({"recipe": recipe, "notes": "damaged"})) == [
        ("made by", "recipe a"),
        ("recipe.activations.bits", "8"),
        ("recipe.kv_cache", "fp8"),
        ("notes", "damaged"),
    ]


@pytest.mark.parametrize("recipe", ["text", ["a"], {"format": "awq"}, None])
def test_what_is_no_recipes_record_is_shown_as_it_is(recipe: object) -> None:
    shown = dict(_recorded({"recipe": recipe}))
    assert "made by" not in shown
    assert bool(shown) == (recipe is not None)
