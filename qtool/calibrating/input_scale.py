"""The scale of a layer's input, where the artifact stores one for engines that round inputs by it.

    scale = largest / largest code, rounded up to bfloat16

largest: max|x| of the calibration, or what an observer finds better in a histogram of it.
"""

import torch

from qtool.calibrating import cache, ranges
from qtool.calibrating.stats import SiteStats
from qtool.errors import SourceError
from qtool.recipe.recipe import Recipe
from qtool.transforms import smooth


def stored_scale(recipe: Recipe, seen: SiteStats | None, name: str) -> float | None:
    """The scale of a layer's input, where the recipe stores one: its range over the largest code.

    Rounded up to bfloat16, in which some engines keep it: the largest input stays in range.
    """
    wanted = recipe.activations
    if wanted is None or wanted.dynamic:
        return None
    if seen is None or seen.max_abs is None:
        raise SourceError(
            f"the input of {name} was never seen in calibration, so its scale cannot be told; "
            "calibrate with more samples, or choose --set activations.dynamic=true"
        )
    limit = float(seen.max_abs.max())
    if seen.histogram is not None and wanted.observer == "percentile":
        limit = min(limit, ranges.percentile(seen.histogram, wanted.percentile))
    elif seen.histogram is not None:

        def rounded(at: float, x: torch.Tensor) -> torch.Tensor:
            rounding = smooth.input_rounding(recipe, at)
            return x if rounding is None else rounding.apply(x)

        limit = ranges.least_squares(seen.histogram, limit, rounded)
    return cache.rounded_up(limit / wanted.reach)
