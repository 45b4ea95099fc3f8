"""Plans of GGUF files."""

from qtool.gguf.source import GgufSource
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.planning.gguf.planned import GgufPlan
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load


def recipe_of(name: str, *sets: str) -> GgufRecipe:
    found = load(name, sets)
    assert isinstance(found, GgufRecipe)
    return found


def plan_of(model: GgufSource, name: str, *sets: str, **more: object) -> GgufPlan:
    return make_gguf_plan(recipe_of(name, *sets), model, **more)  # type: ignore[arg-type]
