"""What a recipe needs to know of what a block's sites read: from a file of statistics, or measured.

A file has no histograms, and is of the model as it was: no recipe that asks for them has one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qtool.blockwise.given import recipe_needs
from qtool.calibrating.pairs import is_compared
from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats, Weights
from qtool.calibrating.stats_file import StatsFile
from qtool.errors import SourceError
from qtool.recipe.recipe import Recipe
from qtool.streaming.stream import LoadedBlock

Stats = dict[str, SiteStats]  # by site id


@dataclass(frozen=True)
class Statistics:
    """Where those of a run come from."""

    recipe: Recipe
    passage: Passage
    saved: StatsFile | None  # None: measured

    def of(self, block: LoadedBlock, sites: Sequence[Site], weights: Weights) -> Stats:
        """All that the recipe's methods and transforms ask for."""
        needs, recipe = recipe_needs(self.recipe), self.recipe
        if recipe.compensates and not recipe.shares_scales and all(map(is_compared, sites)):
            needs -= {"gram"}  # it comes with what the original's input is compared by
            if not needs:
                return {site.id: SiteStats(0) for site in sites}
        found = self._known(block, sites, needs, weights)
        if self.saved is None:  # what is read has been checked
            for site in sites:
                _check_finite(site, found[site.id])
        return found

    def ranges(self, block: LoadedBlock, sites: Sequence[Site]) -> Stats:
        """What scales of inputs are told by."""
        return self._known(
            block, sites, {"max_abs", "histogram"} if self.recipe.measures_ranges else {"max_abs"}
        )

    def with_histograms(self, block: LoadedBlock, sites: Sequence[Site], stats: Stats) -> Stats:
        """With where the values of each input lie, as transforms left them."""
        again = self.passage.collect(block, sites, {"histogram"})
        return {key: replace(one, histogram=again[key].histogram) for key, one in stats.items()}

    def _known(
        self,
        block: LoadedBlock,
        sites: Sequence[Site],
        needs: Iterable[str],
        weights: Weights | None = None,
    ) -> Stats:
        if self.saved is None:
            return self.passage.collect(block, sites, needs, weights=weights)
        return {site.id: self.saved.read(site.id, needs, site.in_features) for site in sites}


def _check_finite(site: Site, stats: SiteStats) -> None:
    """SourceError where what came in is infinite or undefined: every method would make garbage."""
    diagonal = None if stats.gram is None else np.diagonal(stats.gram)
    for values in (diagonal, stats.mean_abs, stats.max_abs):
        if values is not None and not np.isfinite(values).all():
            raise SourceError(
                f"the input of {site.names[0]}: calibration met infinite or undefined activations, "
                "so weights of this block or of one before it are damaged or too large; see their "
                "range with `qtool inspect MODEL --tensor NAME`"
            )
