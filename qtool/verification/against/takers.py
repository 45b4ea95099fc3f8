"""Which matrices have taken up what a norm was divided by: what each says, and what all come to.

Names do not say for sure which matrices read a norm. So all of its block that are as wide are asked
(see `taken`), and those whose names tell that they read one input speak together.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qtool.checkpoints import structure
from qtool.verification.against.compared import Compared
from qtool.verification.against.fit import MATCH, uneven
from qtool.verification.against.pairs import Heads, made
from qtool.verification.against.side_by_side import Floats
from qtool.verification.against.taken import Taken, gain_of

# Of logarithms, how far a gain may be from 0: so much, or this share of the error that rounding
# explains. Rounding and clipping make a matrix smaller (by 2 % at 4 bits, 5 % at 3), not larger.
LEAST, _SMALLER, _LARGER = 0.02, 0.5, 0.15
_COARSEST = 0.3  # relative error that rounding explains: of more it takes a part from all weights
_FORM = 0.02  # how uneven a ratio is that columns can have the form of
_TAKEN = 0.5  # the slope of those that have
_CHANNEL, _OF_SQUARE = 0.18, 18  # likewise of a channel, that times the square of the error


@dataclass(frozen=True)
class Answer:
    """What is known of a norm; of several matrices, what they come to."""

    fine: tuple[Compared, ...] = ()  # that have taken up its scales
    unsure: bool = False  # whether more than these may have
    gain: float | None = None  # of what a matrix has, over what it should have
    off: tuple[str, ...] = ()  # the matrices with that
    as_it_was: bool = False  # the columns are the source's, where the norm's channels are not


def asked(
    key: str, ratio: Floats, block: Sequence[Compared], known: Container[str], heads: Heads
) -> Answer:
    """What the matrices of a block say of a norm. known: of which is said that they are others."""
    sites: dict[str, list[Answer]] = defaultdict(list)
    for c in block:
        others = [other for other in block if other is not c and other.columns is not None]
        answer = Answer(unsure=True) if c.name in known else _answer(c, key, ratio, others, heads)
        if answer is not None:
            sites[structure.input_site(c.name.removesuffix(".weight"))].append(answer)
    answers = [_together(site) for site in sites.values()]
    fine = tuple(c for one in answers for c in one.fine)
    return replace(
        _nearest(answers),
        fine=fine,
        unsure=any(one.unsure for one in answers),
        as_it_was=any(one.as_it_was for one in answers),
    )


def _answer(
    c: Compared, key: str, ratio: Floats, others: Sequence[Compared], heads: Heads
) -> Answer | None:
    """What one matrix says; None where it has nothing to do with the norm."""
    if not c.groups:  # unquantized, and exact: its scales are another check's
        return Answer((c,)) if c.norm == key else None
    found = c.taken.get(key)
    if found is None:
        return None if np.isfinite(c.error) and not c.pruned else Answer(unsure=True)
    expected = math.inf if c.expected is None else c.expected
    if expected > _COARSEST or c.wrong or c.untold or not np.isfinite(found.unlike):
        return Answer(unsure=True)
    if uneven(ratio) > _FORM and found.slope < _TAKEN:
        return Answer(as_it_was=True)
    if found.unlike > MATCH:  # scales of another norm
        return None
    gain = found.gain if np.isfinite(found.gain) else _of_rest(c, found, others, heads)
    if not np.isfinite(gain):
        return Answer(unsure=True)
    return Answer(gain=gain, off=(c.name,)) if _is_off(gain, expected) else Answer((c,))


def _of_rest(c: Compared, found: Taken, others: Sequence[Compared], heads: Heads) -> float:
    """The gain of those rows that no other matrix undoes: of values, or of gate and up in one."""
    maker = replace(c, rows=found.rows, as_columns=None)
    left = np.ones(found.rows.size, bool)
    for other in others:
        for index in made(maker, other, heads):
            left[index] = False
    return gain_of(found.rows[left]) if left.any() and not left.all() else math.nan


def _is_off(gain: float, expected: float) -> bool:
    return abs(gain) > max(LEAST, (_LARGER if gain > 0 else _SMALLER) * expected)


def _together(site: Sequence[Answer]) -> Answer:
    """Of matrices that read one input. Of queries and keys that were scaled inversely, each has a
    gain, and neither is a norm's."""
    fine = tuple(c for one in site for c in one.fine)
    gains = [one.gain for one in site if one.gain is not None]
    if fine:
        return Answer(fine)
    if gains and min(gains) < 0 < max(gains):
        return Answer(unsure=True)
    if gains:
        return _nearest(site)
    if any(one.as_it_was for one in site):
        return Answer(as_it_was=True)
    return Answer(unsure=True)


def _nearest(answers: Sequence[Answer]) -> Answer:
    """The gain that is nearest to none, and all that have one."""
    gains = [one.gain for one in answers if one.gain is not None]
    off = tuple(name for one in answers for name in one.off)
    return Answer(gain=min(gains, key=abs, default=None), off=off)


def off_channels(key: str, ratio: Floats, takers: Iterable[Compared]) -> int:
    """How many channels of a norm none of the matrices has that have taken up its scales."""
    wanted = np.log(ratio) - np.median(np.log(ratio))
    nearest = np.full(ratio.size, np.nan)
    for c in takers:
        found = c.taken.get(key)
        if found is None:  # unquantized, and so exact
            return 0
        limit = np.maximum(max(_CHANNEL, _OF_SQUARE * (c.expected or 0) ** 2), found.reach)
        nearest = np.fmin(nearest, np.abs(found.channels) / limit)
    return int(((nearest > 1) & (np.abs(wanted) > _CHANNEL)).sum())
