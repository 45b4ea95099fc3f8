"""Matrices a few times as far from the source as rounding to the nearest leaves them, among others
that are as near as it does: a fine-tune's in another model's artifact.

Rounding leaves about what the scales explain of every matrix, and searched ranges of small floats
less of all of them. GPTQ leaves more of all matrices, and AWQ of single ones: only where nothing
says that these were at work, and the others are all alike, may it be told.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qtool.messages.sentences import AGAIN, some
from qtool.messages.sentences import count as counted
from qtool.verification.against.compared import Compared
from qtool.verification.against.single_scales import is_folded
from qtool.verification.finding import Finding

_FAR = 1.5  # times the usual error over the expected one
_MOST = 0.25  # of the matrices: more are no exception
_USUAL = 1.15  # of most matrices over the expected: GPTQ leaves more, or they are another model's
_ALIKE = 0.95, 1.05  # the same where nothing says how they were made
_BEYOND = 1.1  # times the usual: and none of the others is farther off
_FEWEST = 4  # matrices, that one of them can be an exception


def to_nearest(recipe: object) -> bool | None:
    """Whether a recorded recipe rounds to the nearest and does nothing else that moves weights
    apart; None where nothing is recorded."""
    if not isinstance(recipe, Mapping) or "method" not in recipe:
        return None
    table = recipe.get("rtn")
    clipped = isinstance(table, Mapping) and table.get("clip") is True
    weights = recipe.get("weights")
    whole = not isinstance(weights, Mapping) or weights.get("type") in (None, "int")
    return recipe["method"] in ("rtn", ["rtn"]) and not (clipped and whole)


def unusual(compared: Sequence[Compared], nearest: bool | None) -> list[Compared]:
    """Those that are too far off, the farthest first. nearest: see `to_nearest`."""
    ratios = {c.name: c.error / c.expected for c in compared if c.expected and not c.untold}
    if nearest is False or len(ratios) < _FEWEST:
        return []
    usual = float(np.median(list(ratios.values())))
    # Weights that lay on the grid already have no error to speak of.
    found = [c for c in compared if ratios.get(c.name, 0.0) > _FAR * max(usual, 1.0)]
    if usual > _USUAL or not 0 < len(found) <= _MOST * len(ratios):
        return []
    if nearest is None:
        names = {c.name for c in found}
        others = [c for c in compared if c.name not in names]
        most = max(ratio for name, ratio in ratios.items() if name not in names)
        if not _ALIKE[0] <= usual <= _ALIKE[1] or most > _BEYOND * usual:
            return []
        if any(is_folded(c) for c in others):
            return []
    return sorted(found, key=lambda c: -ratios[c.name])


def told(check: str, found: Sequence[Compared], nearest: bool | None) -> Iterator[Finding]:
    """An error where it is known that they were rounded to the nearest, else a warning."""
    if not found:
        return
    ratios = [c.error / (c.expected or math.inf) for c in found]
    names = [f"{c.name} ({ratio:.1f} times)" for c, ratio in zip(found, ratios, strict=True)]
    why = (
        "rounding to the nearest leaves no such error, and GPTQ would leave more of the others, too"
    )
    if nearest:
        why = "by qtool.json they were rounded to the nearest, which leaves no such error"
    yield Finding(
        "error" if nearest else "warning", check, found[0].name,
        f"{counted(len(found), 'matrix')} farther from the source than the scales explain, as no "
        f"others are: {some(names)}; {why}; are they of another model, a fine-tune? {AGAIN}",
    )  # fmt: skip
