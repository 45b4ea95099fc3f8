"""What is said of single scales that are not the source's (see `off_scales`)."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qtool.messages.sentences import AGAIN
from qtool.messages.sentences import count as counted
from qtool.verification.against.compared import Compared
from qtool.verification.against.off_scales import NEAR, OffScale
from qtool.verification.against.scaling import are_even
from qtool.verification.against.side_by_side import Floats
from qtool.verification.finding import Finding

_SHOWN = 3
_LARGE = 100


def by_matrix(compared: Sequence[Compared]) -> dict[str, tuple[OffScale, ...]]:
    """By matrix, single scales that are not the source's. Of whole rows they may be folds: only
    those are told that are larger than any other, with no matrix that undoes them."""
    rows = [one.times for c in compared for one in c.off_scales if one.group is None]
    undone = _any_undone(np.log(np.abs(rows)))
    folds = [s for c in compared for s in (c.columns, _fold_of_rows(c)) if s is not None]
    most = max((float(np.abs(np.log(s)).max()) for s in folds), default=0.0)
    found = {}
    for c in compared:
        told = [
            one
            for one in c.off_scales
            if one.group is not None
            or (not undone and abs(math.log(abs(one.times))) > most - math.log(NEAR))
        ]
        if told and c.groups and not c.pruned and math.isfinite(c.error):
            found[c.name] = tuple(told)
    return found


def _any_undone(logarithms: NDArray[np.float64]) -> bool:
    """Whether some factor is about another one's inverse."""
    if not logarithms.size:
        return False
    known = np.sort(logarithms)
    after = np.searchsorted(known, -logarithms).clip(1, known.size) - 1
    near = np.stack([known[after], known[(after + 1).clip(max=known.size - 1)]])
    return bool((np.abs(near + logarithms) < -math.log(NEAR)).any())


def _fold_of_rows(c: Compared) -> Floats | None:
    """Scales of rows that are more than what clipping leaves of them."""
    return None if are_even(c.rows) else c.rows


def is_folded(c: Compared) -> bool:
    """Whether scales were found that are more than what clipping leaves of rows."""
    return c.columns is not None or _fold_of_rows(c) is not None


def told(check: str, found: Mapping[str, Sequence[OffScale]]) -> Iterator[Finding]:
    """One error, the worst first. found: by matrix."""
    scales = [(name, one) for name, several in found.items() for one in several]
    if not scales:
        return
    words = as_words([(one.times, f"{name}, {one.weights}") for name, one in scales])
    yield Finding(
        "error", check, worst([(one.times, name) for name, one in scales]),
        f"{counted(len(scales), 'scale')} of {counted(len(found), 'matrix')} "
        f"{'is' if len(scales) == 1 else 'are'} unlike the source's: {words}; {AGAIN}",
    )  # fmt: skip


def as_words(found: Sequence[tuple[float, str]]) -> str:
    """Factors, and where they are: the worst first, and how many more there are."""
    words = [f"{where}: {_times(times)}" for times, where in sorted(found, key=_nearness)]
    more = f" and {len(words) - _SHOWN:,} more" if len(words) > _SHOWN else ""
    return "; ".join(words[:_SHOWN]) + more


def worst(found: Sequence[tuple[float, str]]) -> str:
    """Where the factor is that is farthest from 1."""
    return min(found, key=_nearness)[1]


def _nearness(one: tuple[float, str]) -> float:
    return -abs(math.log(max(abs(one[0]), 1e-30)))


def _times(factor: float) -> str:
    """`about 2.0 times as large`: rounding leaves no more digits."""
    size = abs(factor)
    digits = f"{factor:.1f}" if 1 <= size < _LARGE else f"{factor:.2g}"
    return f"about {digits if size < _LARGE else f'{factor:,.0f}'} times as large"
