"""`--set` that does not go with a recipe is blamed, and recipes that have it are named."""

import pytest

from qtool.errors import RecipeError
from qtool.recipe import recipe
from qtool.recipe.foreign import GGUF_KEYS, OTHER_KEYS
from qtool.recipe.gguf import GgufRecipe

MINIMAL = "method: rtn\nformat: awq\nweights: {bits: 4, group_size: 128, symmetric: false}\n"
NOT_GGUF = "recipes for formats other than gguf have other keys"


def said(name: str, *sets: str) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe.load(name, sets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "item", "sentence", "instead"),
    [
        ("q4_k_m", "format=mlx", NOT_GGUF, "w4g64-mlx-awq-gptq, w4g64-mlx-rtn,"),
        ("w4g128-awq", "format=gguf", "recipes for GGUF files have other keys", "q4_k_m,"),
        ("w4g128-gptq", "type=Q4_K", "type is a key of recipes for GGUF files", "q4_k_m-awq-gptq,"),
        ("q4_k_m", "weights.group_size=32", "here it is type, such as q4_k_m, that", "w4g32-gptq,"),
        ("fp8-dynamic", "weights.bits=4", "weights: type fp8 has bits 8", "mxfp4,"),
        ("w8a8-smoothquant", "method=none", "or with kv_cache as compressed-tensors", "kv-fp8"),
        ("kv-fp8", "kv_cache.dynamic=true", "scales from calibration (dy", "w4a8kv4-qserve,"),
        ("w8a8-dynamic", "activations.observer=mse", "an observer is for stored scales", ""),
    ],
)
def test_the_item_is_to_blame(name: str, item: str, sentence: str, instead: str) -> None:
    found = said(name, item)
    assert found.startswith(f"--set {item}: does not go with recipe {name}: ")
    assert sentence in found and "\n" not in found and ".yaml" not in found
    assert found.count("; recipes with it: " + instead) == bool(instead)


def test_where_the_item_itself_has_the_error_it_is_told_as_before() -> None:
    found = said("fp8-dynamic", "format=mlx")
    assert found.startswith("--set format=mlx: format: mlx stores no fp8; weights of type fp8 go")
    assert found.endswith("; recipes with it: w8g64-mlx-rtn, w4g64-mlx-rtn, w3g64-mlx-awq-gptq")
    found = said("w8a8-smoothquant", "smooth.alpha=best")
    assert found.endswith("number or 'search', found \"best\"") and found.startswith("--set smooth")


def test_of_several_items_those_that_count_are_named() -> None:
    found = said("q4_k_m", "pure=true", "format=mlx", "calibration.samples=3")
    assert found.startswith("--set format=mlx: does not go with recipe q4_k_m: ")
    both = said("fp8-dynamic", "weights.bits=4", "weights.group_size=32")
    assert both.startswith("--set weights.bits=4, --set weights.group_size=32: do not go with")


def test_a_file_that_is_wrong_by_itself_is_named_with_its_line() -> None:
    with pytest.raises(RecipeError, match=r"^r\.yaml:4: rtn: .* \(the recipe with --set method=gp"):
        recipe.parse(MINIMAL + "rtn: 3\n", "r.yaml", "r", ["method=gptq"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("type: q4_k_m\n", "r.yaml:1: type: a key of recipes for GGUF files, which say `format: g"),
        ("format: gguf\ntype: q4_0\nweights: {bits: 4}\n", "r.yaml:3: weights: a key of recipes f"),
    ],
)
def test_a_file_with_a_key_of_the_other_kind(text: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.parse(text, "r.yaml", "r")
    assert str(caught.value).startswith(sentence)


def test_keys_of_one_kind_of_recipes_alone() -> None:
    ours, others = set(GgufRecipe.model_fields), set(recipe.Recipe.model_fields)
    assert set(GGUF_KEYS) == ours - others and set(OTHER_KEYS) == others - ours
