"""The ids of a long text, some of it at a time: what a tokenizer keeps of a text while it works is
more than a hundred times as large, and a text may be longer than memory.

A text may be cut where the ids of what lies around the cut are those of its two sides: tokens
depend on their neighbours, but not on what is far away. So ids are those of the text as one. Where
no such place is found, the rest is encoded at once.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Encode = Callable[[str], Ids]  # all of a text at once, without special tokens

_AT_ONCE = 1 << 18  # characters that are encoded together
_AROUND = 1 << 10  # on either side of a cut
_MORE = (0, 1, 2, 3, 5, 7)  # characters on either side
# What lies before a cut, and how many such places are looked at.
_PLACES = (
    (re.compile(r"\S\s{0,60}\n(?=\S)"), 8),
    (re.compile(r"\S(?=\s{1,60}\S)"), 8),
    (re.compile(r"(\S)(?!\1)(?=\S)"), 64),
)


def encoded(encode: Encode, text: Iterable[str]) -> Iterator[Ids]:
    """The ids of a text that comes some at a time: those that `encode` gives of all of it."""
    small = (part[i : i + _AT_ONCE] for part in text for i in range(0, len(part), _AT_ONCE))
    for part in _parts(encode, small):
        yield encode(part)


def filled(held: str, text: Iterator[str], characters: int) -> str:
    """With what comes, until there are so many, or no more come."""
    parts, there = [held], len(held)
    while there < characters and (more := next(text, None)) is not None:
        parts.append(more)
        there += len(more)
    return "".join(parts)


def _parts(encode: Encode, text: Iterator[str]) -> Iterator[str]:
    """The text again, cut where it may be."""
    held = ""
    while True:
        held = filled(held, text, _AT_ONCE + _AT_ONCE // 4 + 2 * _AROUND)
        cut = _cut(encode, held) if len(held) > _AT_ONCE else None
        if cut is None:
            break
        yield held[: cut[0]]
        held = held[cut[1] :]
    yield "".join([held, *text])


def _cut(encode: Encode, text: str) -> tuple[int, int] | None:
    """Where to end a part and where to begin the next one; None where no place was found. What
    puts a space before any text wants one that is there left out."""
    for end in _places(text, _AT_ONCE):
        for begin in (end, end + 1) if text[end] == " " else (end,):
            if _is_cut(encode, text, end, begin):
                return end, begin
    return None


def _is_cut(encode: Encode, text: str, end: int, begin: int) -> bool:
    """Whether ids of what lies around are those of both sides, wherever these begin and end: in
    what repeats itself tokens are in step with its beginning or its end, however far away."""
    for more in _MORE:
        before = text[end - _AROUND - more : end]
        behind = text[begin : begin + _AROUND + more]
        whole = encode(before + text[end:begin] + behind)
        sides = [encode(before), encode(behind)]
        if not np.array_equal(whole, np.concatenate(sides)):
            return False
    return True


def _places(text: str, start: int) -> Iterator[int]:
    """Where lines begin, then where words end, then between any two letters or signs."""
    for pattern, tries in _PLACES:
        found = pattern.finditer(text, start, start + _AT_ONCE // 4)
        yield from (one.end() for one, _ in zip(found, range(tries), strict=False))
