"""Which inputs of a block are measured together, and the matrices that read them quantized then."""

from collections.abc import Sequence

from qtool.calibrating.pairs import is_compared
from qtool.calibrating.sites import Site
from qtool.memory import gram_sum_bytes
from qtool.recipe.recipe import Recipe


def groups_of(sites: Sequence[Site], gram_bytes: int) -> list[list[Site]]:
    """As many at once as their Gram matrices leave room for, the last ones of the block first.

    No input that is still to be measured then depends on a matrix that is already quantized: the
    statistics are the same for any grouping.
    """
    groups: list[list[Site]] = []
    room = 0
    for site in reversed(sites):
        size = gram_sum_bytes(site.in_features)
        if not groups or size > room:
            groups.append([])
            room = gram_bytes
        groups[-1].insert(0, site)
        room -= size
    return groups or [[]]


def groups_for(recipe: Recipe, sites: Sequence[Site], gram_bytes: int) -> list[list[Site]]:
    """groups_of(), with two exceptions: scales of AWQ and of smoothing are shared by sites, so all
    are one group; and where matrices compensate for what their inputs lost, these come one after
    another, so that each sees what those before it have become."""
    if recipe.shares_scales:
        return [list(sites)]
    if not recipe.compensates:
        return groups_of(sites, gram_bytes)
    rest = [site for site in sites if not is_compared(site)]
    alone = [[site] for site in sites if is_compared(site)]
    return [*alone, *(groups_of(rest, gram_bytes) if rest else [])] or [[]]
