"""The scale of a layer's input, where the artifact stores one for engines that round inputs by it.

    input_scale           largest / largest code, rounded up to bfloat16
    input_global_scale    448 * 6 / largest, of NVFP4, in float32: engines multiply by it; 1 where
                          that is no number, as for weights

largest: max|x| of the calibration, or what an observer finds better in a histogram of it. Matrices
that read one input, and so q/k/v, gate/up and w1/w3, get one number.
"""

import numpy as np
import torch

from qtool.calibrating import cache, ranges
from qtool.calibrating.stats import SiteStats
from qtool.errors import SourceError
from qtool.recipe.recipe import Recipe
from qtool.transforms import smooth_search


def stored_scale(recipe: Recipe, seen: SiteStats | None, name: str) -> float | None:
    """The scale of a layer's input, where the recipe stores one.

    One that is rounded is rounded up to bfloat16, in which some engines keep it: the largest input
    stays in range.
    """
    wanted = recipe.activations
    if wanted is None or not wanted.stored_as:
        return None
    if seen is None or seen.max_abs is None:
        other = "activations=null" if wanted.dynamic else "activations.dynamic=true"
        raise SourceError(
            f"the input of {name} was never seen in calibration, so its scale cannot be told; "
            f"calibrate with more samples, or choose --set {other}"
        )
    limit = float(seen.max_abs.max())
    if seen.histogram is not None and wanted.observer == "percentile":
        limit = min(limit, ranges.percentile(seen.histogram, wanted.percentile))
    elif seen.histogram is not None:

        def rounded(at: float, x: torch.Tensor) -> torch.Tensor:
            rounding = smooth_search.input_rounding(recipe, at)
            return x if rounding is None else rounding.apply(x)

        limit = ranges.least_squares(seen.histogram, limit, rounded)
    if wanted.type == "nvfp4":
        with np.errstate(divide="ignore", over="ignore"):
            outer = np.float32(wanted.reach) / np.float32(limit)
        return float(outer) if np.isfinite(outer) else 1.0
    return cache.rounded_up(limit / wanted.reach)
