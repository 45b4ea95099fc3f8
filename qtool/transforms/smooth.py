"""SmoothQuant: large channels of an input become smaller, those of the weights larger.

    s_j = max|x_j|^a / max|w_j|^(1-a)     over all tokens, and all rows of all matrices that read x
    y = (x / s) (W s)'                    x / s is folded into what makes x

With a = 1/2 both sides are as wide; a larger a leaves more to the weights. Which producer can take
x / s is proved by numbers (`qtool.transforms.fold`); where none can, the input stays and a note
says so. Where a reader or producer is written in a 16-bit dtype, or a bias is, scales are powers
of two, which lose no bit there.

`alpha: search` looks for the best exponent of each input (`qtool.transforms.smooth_search`).

By default the inputs that a norm makes are smoothed (`sites: norms`), as the paper does; with
`sites: all` also those that an earlier matrix makes: down_proj by up_proj, o_proj by v_proj.

Source: Xiao et al., SmoothQuant, 2022, section 4.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from qtool.calibrating.stats import SiteStats, is_rare
from qtool.checkpoints.scaled import Factor
from qtool.streaming.stream import LoadedBlock
from qtool.transforms import smooth_search
from qtool.transforms.proved import (
    Applied,
    Floats,
    Subject,
    apply_fold,
    dense_parts,
    factors_of,
    inputs_listed,
    listed,
    powers_of_two,
    proved_folds,
    takes_part,
    too_large,
)

if TYPE_CHECKING:
    from qtool.recipe.recipe import Recipe

_LEAST = 1e-4  # of the largest channel, for channels that are nearly silent
_16_BITS = ("F16", "BF16")


def needs(recipe: "Recipe") -> frozenset[str]:
    """The statistics that it asks for."""
    return frozenset({"max_abs"} | ({"gram"} if recipe.smooth.alpha == "search" else set()))


def scales(max_abs: Floats, max_weight: Floats, alpha: float) -> Floats:
    """max|x|^a / max|w|^(1-a), [in]. A channel that is always zero keeps scale 1."""
    live = (max_abs > 0) & (max_weight > 0)
    if not live.any():
        return np.ones_like(max_abs)
    x, w = (
        np.log(np.maximum(level.astype(np.float64), _LEAST * float(level.max())))
        for level in (max_abs, max_weight)
    )
    return np.where(live, np.exp(alpha * x - (1 - alpha) * w), 1).astype(np.float32)


def apply(subject: Subject, stats: Mapping[str, SiteStats]) -> Applied:
    """Smooth the inputs of a block, in place. stats are used up."""
    block, plan, recipe = subject.block, subject.plan, subject.recipe
    found, stream = subject.found, subject.stream
    result = dict(stats)
    changed: set[str] = set()
    notes: list[str] = []
    smoothed: list[list[str]] = []
    factors: list[Factor] = []
    options = recipe.smooth
    groups = proved_folds(block, found, stats, stream, projections=options.sites == "all")
    inputs: dict[str, smooth_search.Halves] = {}
    if options.alpha == "search" and recipe.activations is not None:
        inputs = smooth_search.sampled_inputs(block, stream, found.sites)
    for sites, chosen in groups:
        names = [name for site in sites for name in site.names if takes_part(plan, name)]
        seen = [s for s in sites if s.id in stats and not is_rare(s, stats[s.id])]
        seen = [site for site in seen if stats[site.id].max_abs is not None]
        if not names or not seen:
            continue
        readers_of = [name.removeprefix(block.prefix) for name in names]
        said = listed(readers_of)
        if chosen is None:
            notes.append(f"not smoothed: the input of {said}; nothing before it takes scales")
            continue
        max_weight = chosen.largest(_max_weight(block, names))
        exact = dense_parts(chosen, sites, plan) or (
            chosen.bias is not None and plan.by_name[chosen.bias].dtype in _16_BITS
        )
        measured = smooth_search.levels(recipe, [stats[site.id] for site in seen])
        levels = [chosen.largest(level) for level in measured]
        if options.alpha == "search":
            steps = [step / options.grid for step in range(options.grid + 1)]
            candidates = [[np.ones_like(level) for level in levels]]
            candidates += [_scales(levels, max_weight, step, bool(exact)) for step in steps]
            readers = smooth_search.measured(block, seen, stats, plan, inputs)
            work = partial(smooth_search.cost, readers, recipe, levels)
            best = candidates[int(np.argmin(subject.workers.map(work, candidates)))][0]
        else:
            best = _scales(levels, max_weight, float(options.alpha), bool(exact))[0]
        lost = too_large(block, chosen, best, plan)
        if lost is not None:
            notes.append(
                f"not smoothed: the input of {said}; {lost} could not hold its scales in float16"
            )
        elif not (best == 1).all():
            changed |= apply_fold(block, chosen, sites, best, plan, result)
            factors += factors_of(block, chosen, best)
            smoothed.append(readers_of)
    if smoothed:
        notes.append(f"smoothed: the inputs of {inputs_listed(smoothed)}")
    return Applied(result, frozenset(changed), tuple(notes), tuple(factors))


def _scales(
    levels: Sequence[Floats], max_weight: Floats, alpha: float, exact: bool
) -> list[Floats]:
    found = [scales(level, max_weight, alpha) for level in levels]
    return [powers_of_two(one) for one in found] if exact else found


def _max_weight(block: LoadedBlock, names: Sequence[str]) -> Floats:
    levels = [block.weights[name].abs().amax(0).numpy() for name in names]
    largest: Floats = np.maximum.reduce(levels)
    return largest
