"""What a recipe does to a model, in a line for people."""

from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe


def methods(recipe: Recipe | GgufRecipe) -> str | None:
    """Transforms and methods in order, with what they were told to look at, and how much text; None
    where no activations are looked at."""
    if not recipe.calibrates:
        return None
    if isinstance(recipe, Recipe):
        chain, rounding = recipe.transform_chain, recipe.rounding
    else:
        chain, rounding = recipe.transforms, "gptq" if recipe.sweeps else "importance"
    asked = {"guided": recipe.guides, "gptaq": recipe.compensates, "yaqa": recipe.feeds_back}
    told = ", ".join(f"gptq.{name} {value:g}" for name, value in asked.items() if value)
    done = [*chain, *([] if rounding == "none" else [rounding + (f" ({told})" if told else "")])]
    done += ["tune"] * recipe.tunes
    if isinstance(recipe, Recipe) and recipe.measures_cache:
        done.append("kv_cache")
    text = recipe.calibration
    return f"{', '.join(done)}; calibrated on {text.samples} samples of {text.length} tokens"
