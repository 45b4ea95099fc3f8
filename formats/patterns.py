"""Regular expressions from files, matched in time that is bounded, whatever they say.

    expression   branch | branch ...
    branch       pieces, one after the other
    piece        atom, or atom repeated: *  +  ?  {n}  {n,}  {,n}  {n,m}, lazily too
    atom         a character, . , [a class], an escape, ^ $ \\b \\B \\A \\Z, (group), (?:group),
                 (?P<name>group), (?=group), (?!group)

What is matched is not one place but a set of places: bit i of an integer says that the part
before may end before character i of the name. Every piece turns the set of places where it may
begin into that of places where it may end, so nothing is ever tried twice, and there is no
backtracking that could take exponential time. Lookbehinds, back references, flags and atomic
groups are not matched here, and what they mean is not known; so it is of an expression that no
engine can read.

Source: the Python library's documentation of `re`. The carries of an addition that run through a
stretch of ones are known from Parabix (Cameron et al. 2014).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

_LONGEST_NAME = 512
_LONGEST_EXPRESSION = 4000
_DEEPEST = 20
_MOST_TIMES = 1000
_STEPS = 5000  # of one match
_REPEAT = re.compile(r"[*+?]|\{([0-9]+|[0-9]*,[0-9]*)\}")
_GROUP = re.compile(r"\((\?(?::|=|!|P<[A-Za-z_]\w{0,60}>)|(?!\?))")
_SETS = re.compile(r"\[\[|--|&&|~~|\|\|")  # in a class: kept for a later Python


class _Unknown(Exception):
    """An expression that is not matched here."""


# Whether a character is one that an atom means.
_Test = Callable[[str], bool]


@dataclass
class _Name:
    """A name that is matched, and what is left of the steps."""

    text: str
    steps: int = _STEPS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _Unknown


@lru_cache(maxsize=1 << 14)
def _where(text: str, test: _Test) -> int:
    """The places of the characters that are meant."""
    return sum(1 << at for at, character in enumerate(text) if test(character))


# From the places where it may begin to those where it may end.
_Piece = Callable[[_Name, int], int]


def matches(expression: str, name: str) -> bool | None:
    """Whether it matches from the start of the name; None where that is not known."""
    if not 0 < len(name) <= _LONGEST_NAME or "\n" in name:
        return None
    piece = _parsed(expression)
    try:
        return None if piece is None else piece(_Name(name), 1) != 0
    except _Unknown:
        return None


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """Whether one is true; None where none is, and one is not known."""
    unknown = False
    for answer in answers:
        if answer:
            return True
        unknown = unknown or answer is None
    return None if unknown else False


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> _Piece | None:
    if len(expression) > _LONGEST_EXPRESSION:
        return None
    try:
        piece, end = _branches(expression, 0, 0)
    except _Unknown:
        return None
    return piece if end == len(expression) else None


def _branches(text: str, at: int, depth: int) -> tuple[_Piece, int]:
    """Branches up to a closing parenthesis or the end; and where that is."""
    if depth > _DEEPEST:
        raise _Unknown
    branches = []
    while True:
        pieces: list[_Piece] = []
        literal = ""
        while at < len(text) and text[at] not in "|)":
            piece, at = _repeated(text, at, depth)
            if isinstance(piece, str):
                literal += piece
                continue
            pieces += [_literally(literal), piece] if literal else [piece]
            literal = ""
        branches.append(_sequence([*pieces, _literally(literal)] if literal else pieces))
        if at == len(text) or text[at] == ")":
            return _either(branches), at
        at += 1


def _repeated(text: str, at: int, depth: int) -> tuple[_Piece | str, int]:
    """An atom with what says how often it stands; a plain character as itself."""
    start = at
    atom, at, plain, fixed = _atom(text, at, depth)
    found = _REPEAT.match(text, at)
    if found is None:
        return plain or atom, at
    at, (low, high) = found.end(), _bounds(found)
    at += text[at : at + 1] == "?"  # as few as possible: another match, but of the same names
    if fixed or text[at : at + 1] in ("*", "+", "?") or _REPEAT.match(text, at):
        raise _Unknown
    test = _test(text[start : found.start()])
    if test is not None and low < 2 and high is None:
        return _stretch(test, low), at
    return _times(atom, low, high), at


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    """How often at least and at most."""
    if found[0] in "*+?":
        return int(found[0] == "+"), 1 if found[0] == "?" else None
    first, comma, last = found[1].partition(",")
    low = int(first[:9] or 0)
    high = low if not comma else int(last[:9]) if last else None
    if max(low, high or 0) > _MOST_TIMES or (high is not None and low > high):
        raise _Unknown
    return low, high


def _atom(text: str, at: int, depth: int) -> tuple[_Piece, int, str, bool]:
    """An atom, where it ends, the character that it is, and whether it may not be repeated."""
    sign = text[at]
    if _REPEAT.match(text, at):
        raise _Unknown
    if sign == "(":
        return _group(text, at, depth)
    if sign in "^$":
        return (_at_start if sign == "^" else _at_end), at + 1, "", True
    if sign == "\\" and (place := _PLACES.get(text[at + 1 : at + 2])):
        return place, at + 2, "", True
    end = _end_of_character(text, at)
    test = _test(text[at:end])
    if test is None:
        raise _Unknown
    last = text[end - 1]
    plain = (end - at == 1 and sign != ".") or (sign == "\\" and not last.isalnum())
    return _character(test), end, last if plain else "", False


def _group(text: str, at: int, depth: int) -> tuple[_Piece, int, str, bool]:
    found = _GROUP.match(text, at)
    if found is None:
        raise _Unknown
    inner, end = _branches(text, found.end(), depth + 1)
    if end == len(text):
        raise _Unknown
    if found[1] in ("?=", "?!"):
        return _looking(inner, found[1] == "?="), end + 1, "", True
    return inner, end + 1, "", False


def _end_of_character(text: str, at: int) -> int:
    """Where one character, escape or class ends."""
    if text[at] != "[":
        return at + (2 if text[at] == "\\" else 1)
    end = at + 1 + (text[at + 1 : at + 2] == "^")
    end += text[end : end + 1] == "]"
    while end < len(text) and text[end] != "]":
        end += 2 if text[end] == "\\" else 1
    return min(end + 1, len(text))


@lru_cache(maxsize=4096)
def _test(atom: str) -> _Test | None:
    """The test of an atom that means one character; None where it does not."""
    if len(atom) == 1 and atom not in ".^$\\([":
        return atom.__eq__
    escape = atom[:1] == "\\" and len(atom) == 2 and not atom[1].isdecimal()
    if not (atom == "." or escape or (atom[:1] == "[" and not _SETS.search(atom))):
        return None
    try:
        found = re.compile(atom)
    except (re.error, OverflowError):
        return None
    return lambda character: found.fullmatch(character) is not None


def _literally(literal: str) -> _Piece:
    def run(name: _Name, places: int) -> int:
        name.step()
        text, found = name.text, 0
        at = text.find(literal, (places & -places).bit_length() - 1)
        while at >= 0:
            found |= 1 << at
            at = text.find(literal, at + 1) if places >> (at + 1) else -1
        return (found & places) << len(literal)

    return run


def _character(test: _Test) -> _Piece:
    def run(name: _Name, places: int) -> int:
        name.step()
        return (places & _where(name.text, test)) << 1

    return run


def _stretch(test: _Test, low: int) -> _Piece:
    """One character any number of times: the carries of one addition."""

    def run(name: _Name, places: int) -> int:
        name.step()
        there = _where(name.text, test)
        if low:
            places = (places & there) << 1
        return (((places & there) + there) ^ there) | places

    return run


def _sequence(pieces: list[_Piece]) -> _Piece:
    def run(name: _Name, places: int) -> int:
        for piece in pieces:
            if not places:
                return 0
            places = piece(name, places)
        return places

    return run


def _either(branches: list[_Piece]) -> _Piece:
    def run(name: _Name, places: int) -> int:
        found = 0
        for branch in branches:
            found |= branch(name, places)
        return found

    return branches[0] if len(branches) == 1 else run


def _times(piece: _Piece, low: int, high: int | None) -> _Piece:
    def run(name: _Name, places: int) -> int:
        for _ in range(low):
            name.step()
            places = piece(name, places) if places else 0
        found = new = places
        count = low
        while new and (high is None or count < high):
            name.step()
            new = piece(name, new) & ~found
            found |= new
            count += 1
        return found

    return run


def _looking(piece: _Piece, wanted: bool) -> _Piece:
    def run(name: _Name, places: int) -> int:
        found = 0
        for at in range(len(name.text) + 1):
            if places >> at & 1:
                name.step()
                found |= ((piece(name, 1 << at) != 0) is wanted) << at
        return found

    return run


def _at_start(name: _Name, places: int) -> int:
    return places & 1


def _at_end(name: _Name, places: int) -> int:
    return places & 1 << len(name.text)


def _at_edge(name: _Name, places: int) -> int:
    word = _where(name.text, _word)
    return places & (word ^ word << 1)


def _inside(name: _Name, places: int) -> int:
    return places & ~_at_edge(name, places)


def _word(character: str) -> bool:
    return character.isalnum() or character == "_"


_PLACES: dict[str, _Piece] = {"A": _at_start, "Z": _at_end, "b": _at_edge, "B": _inside}
