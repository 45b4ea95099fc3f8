"""What the routed experts of a block read, together: for those that no token reached.

Engines that round inputs by a stored scale want one of every expert. One that no token of the
calibration reached has none of its own; it is taken to read what its siblings read: the same
hidden states before gate and up, and what the same kind of matrices make of them before down.
Scales that transforms fold into a sibling's own matrices it does not get: there it reads what they
read before.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats
from qtool.formats.layer_names import experts_of

Stats = dict[str, SiteStats]  # by site id
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # and not those of w1, w2 and w3


def _kind(name: str) -> str:
    """What siblings have in common: experts.5.down_proj -> experts.*.down_proj."""
    return _NUMBER.sub("*", name)


class Siblings:
    """One block's, whose sites are measured group by group."""

    def __init__(self, sites: Iterable[Site]) -> None:
        found = [site for site in sites if site.expert is not None or experts_of(site.id)]
        self._waiting = {site.id: site for site in found}
        self._together: Stats = {}  # by kind
        self._before: Stats = {}  # transforms, what matrices of one expert make

    def transforming(self, stats: Stats) -> None:
        """Statistics that transforms are about to change."""
        self._before = {
            key: stats[key]
            for key, site in self._waiting.items()
            if site.producer is None and key in stats
        }

    def filled(
        self,
        stats: Stats,
        unread: Iterable[str],
        measured: Callable[[Sequence[Site]], Stats],
    ) -> Stats:
        """Statistics of a group, those of experts that none reached from their siblings.

        unread: names of matrices that no call was seen to read, which get theirs by name. measured:
        measures siblings of groups to come, whose inputs no matrix has changed that is quantized
        already, so that the groups make no difference.
        """
        here = [key for key in stats if self._waiting.pop(key, None) is not None]
        self._add({key: stats[key] for key in here})
        missing = [key for key in here if stats[key].max_abs is None]
        missing += filter(experts_of, unread)
        kinds = {_kind(key) for key in missing}
        later = [site for site in self._waiting.values() if _kind(site.id) in kinds]
        if later:
            self._add(measured(later))
            for site in later:
                del self._waiting[site.id]
        known = {key: self._together.get(_kind(key)) for key in missing}
        return {**stats, **{key: found for key, found in known.items() if found is not None}}

    def _add(self, stats: Stats) -> None:
        for key, one in stats.items():
            own = self._before.get(key, one)
            if own.max_abs is not one.max_abs:  # scales were folded into what makes it
                one = replace(one, max_abs=own.max_abs, histogram=None)
            if one.max_abs is not None:
                known = self._together.get(_kind(key))
                self._together[_kind(key)] = _both(known, one)


def _both(before: SiteStats | None, one: SiteStats) -> SiteStats:
    """What a scale is told by, and no tokens: none of them reached who gets it."""
    top, histogram = one.max_abs, one.histogram
    if before is not None and before.max_abs is not None and top is not None:
        top = np.maximum(before.max_abs, top)
        if before.histogram is None or histogram is None:
            histogram = None
        else:
            histogram = before.histogram + histogram
    return SiteStats(0, max_abs=top, histogram=histogram)
