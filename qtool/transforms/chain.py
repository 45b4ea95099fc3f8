"""The transforms of a recipe that are done block by block, one after another. A rotation is none of
them: it is a view of the source."""

from collections.abc import Iterable

from qtool.calibrating.stats import SiteStats
from qtool.checkpoints.scaled import Factor
from qtool.transforms import awq, smooth, smooth_attention
from qtool.transforms.proved import Applied, Subject

TRANSFORMS = {
    "smooth": smooth.apply,
    "smooth-attention": smooth_attention.apply,
    "awq": awq.apply,
}


def apply_in_turn(names: Iterable[str], subject: Subject, stats: dict[str, SiteStats]) -> Applied:
    """Those of these names that are done block by block, in their order, each on what the one
    before it has left; what all of them did. stats are used up: what a transform maps is not there
    twice while the next one works."""
    changed: frozenset[str] = frozenset()
    notes: list[str] = []
    factors: list[Factor] = []
    for name in names:
        if name not in TRANSFORMS:
            continue
        applied = TRANSFORMS[name](subject, stats)
        if applied.stats is not stats:
            stats.clear()  # whoever called has it, too
        stats, changed = applied.stats, changed | applied.changed
        notes += applied.notes
        factors += applied.factors
    return Applied(stats, changed, tuple(notes), tuple(factors))
