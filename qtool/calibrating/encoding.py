"""The ids of a long text, some of it at a time: what a tokenizer keeps of a text while it works is
more than a hundred times as large.

A text may be cut where the ids of what lies around the cut are those of its two sides: tokens
depend on their neighbours, but not on what is far away. So ids are those of the text as one. Where
no such place is found, the rest is encoded at once.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_AT_ONCE = 1 << 18  # characters that are encoded together
_AROUND = 1 << 10  # on either side of a cut
_PLACES = (("\n", 1, 8), (" ", 0, 8), ("", 0, 64))  # of a cut: at, and how far behind, what is
# found in the text, so many times


def encoded(tokenizer: Any, text: str, special: bool = False) -> Ids:
    """The ids that tokenizer.encode() gives of all of the text, with special tokens (BOS and the
    like) where that is asked for."""
    if len(text) <= _AT_ONCE:
        return _ids(tokenizer, text, special)
    around = _specials(tokenizer, text[:_AROUND]) if special else ([], [])
    if around is None:
        return _ids(tokenizer, text, special)
    parts = (_ids(tokenizer, part) for part in _parts(tokenizer, text))
    return np.concatenate([*around[0], *parts, *around[1]])


def _ids(tokenizer: Any, text: str, special: bool = False) -> Ids:
    return np.array(tokenizer.encode(text, add_special_tokens=special).ids, dtype=np.int64)


def _parts(tokenizer: Any, text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _AT_ONCE:
        cut = _cut(tokenizer, text, start + _AT_ONCE)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _cut(tokenizer: Any, text: str, start: int) -> int | None:
    """The first place from `start` on that was found to be one; None where none was."""
    for cut in _places(text, start):
        before, behind = text[cut - _AROUND : cut], text[cut : cut + _AROUND]
        sides = [_ids(tokenizer, before), _ids(tokenizer, behind)]
        if np.array_equal(_ids(tokenizer, before + behind), np.concatenate(sides)):
            return cut
    return None


def _places(text: str, start: int) -> Iterator[int]:
    """Where lines begin, then where words or anything else does."""
    for mark, ahead, tries in _PLACES:
        at = start
        for _ in range(tries):
            at = text.find(mark, at + 1)
            if at < 0 or at + ahead >= len(text):
                break
            yield at + ahead


def _specials(tokenizer: Any, text: str) -> tuple[list[Ids], list[Ids]] | None:
    """What the tokenizer puts before a text and behind it; None where it does otherwise."""
    plain, whole = _ids(tokenizer, text), _ids(tokenizer, text, special=True)
    for start in range(len(whole) - len(plain) + 1):
        if np.array_equal(whole[start : start + len(plain)], plain):
            return [whole[:start]], [whole[start + len(plain) :]]
    return None
