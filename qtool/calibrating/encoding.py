"""The ids of a long text, some of it at a time: what a tokenizer keeps of a text while it works is
more than a hundred times as large.

A text may be cut where the ids of what lies around the cut are those of its two sides: tokens
depend on their neighbours, but not on what is far away. So ids are those of the text as one. Where
no such place is found, the rest is encoded at once.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_AT_ONCE = 1 << 18  # characters that are encoded together
_AROUND = 1 << 10  # on either side of a cut
_MORE = (0, 1, 2, 3, 5, 7)  # characters on either side
# What lies before a cut, and how many such places are looked at.
_PLACES = (
    (re.compile(r"\S\s{0,60}\n(?=\S)"), 8),
    (re.compile(r"\S(?=\s{1,60}\S)"), 8),
    (re.compile(r"(\S)(?!\1)(?=\S)"), 64),
)


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
        yield text[start : cut[0]]
        start = cut[1]
    yield text[start:]


def _cut(tokenizer: Any, text: str, start: int) -> tuple[int, int] | None:
    """Where to end a part and where to begin the next one, from `start` on; None where no place
    was found. What puts a space before any text wants one that is there left out."""
    for end in _places(text, start):
        for begin in (end, end + 1) if text[end] == " " else (end,):
            if _is_cut(tokenizer, text, end, begin):
                return end, begin
    return None


def _is_cut(tokenizer: Any, text: str, end: int, begin: int) -> bool:
    """Whether ids of what lies around are those of both sides, wherever these begin and end: in
    what repeats itself tokens are in step with its beginning or its end, however far away."""
    for more in _MORE:
        before = text[end - _AROUND - more : end]
        behind = text[begin : begin + _AROUND + more]
        whole = _ids(tokenizer, before + text[end:begin] + behind)
        sides = [_ids(tokenizer, before), _ids(tokenizer, behind)]
        if not np.array_equal(whole, np.concatenate(sides)):
            return False
    return True


def _places(text: str, start: int) -> Iterator[int]:
    """Where lines begin, then where words end, then between any two letters or signs."""
    for pattern, tries in _PLACES:
        found = pattern.finditer(text, start, start + _AT_ONCE // 4)
        yield from (one.end() for one, _ in zip(found, range(tries), strict=False))


def _specials(tokenizer: Any, text: str) -> tuple[list[Ids], list[Ids]] | None:
    """What the tokenizer puts before a text and behind it; None where it does otherwise."""
    plain, whole = _ids(tokenizer, text), _ids(tokenizer, text, special=True)
    if not len(plain):
        return None
    for start in range(len(whole) - len(plain) + 1):
        if np.array_equal(whole[start : start + len(plain)], plain):
            return [whole[:start]], [whole[start + len(plain) :]]
    return None
