"""What files of records say: one text or one chat after the other.

A record is {"text": ...}, {"prompt": ..., "completion": ...}, one behind the other, or a chat
(qtool.texts.chats). It is a line of JSONL, an element of a JSON array, a row of CSV or of Parquet.
"""

import csv
import json
import re
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

from qtool.errors import SourceError
from qtool.texts.chats import LISTS, PAIR, Chat, chat_of
from qtool.texts.stored import TABLES, kind_of

TEXT = "text"
Record = tuple[str, Any]  # where it is, and what it is
_LONGEST_CELL = 1 << 30  # characters
_LONGEST_ELEMENT = 1 << 26
_NO_SPACE = re.compile("[^ \\t\\n\\r]")
_DECODER = json.JSONDecoder()
_EXPECTED = (
    "expected an object whose `text` is a string (or `prompt` and `completion` are), or a chat "
    "whose `messages` (or `conversations`) are a list"
)


def texts_and_chats(records: Iterator[Record]) -> Iterator[str | Chat]:
    """What each record says; SourceError where it says neither."""
    for where, record in records:
        plain = text_of(record)
        found = chat_of(record, where) if plain is None else plain
        if found is None:
            raise SourceError(f"{where}: {_EXPECTED}{_instead(record)}")
        yield found


def text_of(record: Any) -> str | None:
    """What a record says that is no chat; None for all others."""
    if not isinstance(record, dict):
        return None
    if isinstance(text := record.get(TEXT), str):
        return text
    parts = [record.get(key) for key in PAIR]
    said = [part for part in parts if isinstance(part, str)]
    return "".join(said) if len(said) == len(parts) else None


def has_columns(names: list[str]) -> bool:
    """Whether rows of a table may be records: by its columns, of which none is there twice."""
    one_of = ({TEXT}, {*PAIR}, *({name} for name in LISTS))
    return len({*names}) == len(names) and any(some <= {*names} for some in one_of)


def from_json(path: Path, text: Iterator[str]) -> Iterator[Record]:
    """Of a file of JSON: an object a line, or an array of objects."""
    begin = ""
    while not begin.strip() and (some := next(text, None)) is not None:
        begin += some
    of = _elements if begin.lstrip().startswith("[") else _lines_of_json
    for where, record in of(path, chain((begin,), text)):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"{where}: its text has half of a surrogate pair, which is no character"
            ) from None
        yield where, record


def _lines_of_json(path: Path, text: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(_lines(text), start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise SourceError(
                    f"{where}: not JSON; expected JSONL, one object a line with `text` or "
                    "`messages`"
                ) from None
            yield where, record


def _elements(path: Path, text: Iterator[str]) -> Iterator[Record]:
    """Of an array, of which no more is held than an element or what is read at once."""
    held = _Held(text)
    held.take("[")
    ended = held.take("]")
    for number in count(1):
        if ended:
            break
        where = f"{path}: element {number}"
        yield where, held.element(where)
        ended = held.take("]")
        if not ended and not held.take(","):
            raise SourceError(f"{where}: expected `,` or `]` behind it; is the file whole?")
    if held.next():
        raise SourceError(f"{path}: expected nothing behind its array, found {held.next()!r}")


class _Held:
    """Text of which more is read as it is asked for."""

    def __init__(self, text: Iterator[str]) -> None:
        self._text, self._held, self._at = filter(None, text), "", 0

    def next(self) -> str:
        """The next character that is no space, which stays; empty at the end."""
        while not (found := _NO_SPACE.search(self._held, self._at)):
            self._held, self._at = next(self._text, ""), 0
            if not self._held:
                return ""
        self._at = found.start()
        return found[0]

    def take(self, character: str) -> bool:
        """Whether it is next, behind which what is next is then looked for."""
        found = self.next() == character
        self._at += found
        return found

    def element(self, where: str) -> Any:
        """The value that begins with what is next."""
        self.next()
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._held, self._at)
                return value
            except (ValueError, RecursionError):
                there = len(self._held) - self._at
                self._held, self._at = self._held[self._at :], 0
                while len(self._held) <= 2 * there and (some := next(self._text, "")):
                    self._held += some
                if not there < len(self._held) <= _LONGEST_ELEMENT:
                    raise SourceError(
                        f"{where}: not JSON, broken off, or longer than "
                        f"{_LONGEST_ELEMENT >> 20} million characters; expected an object"
                    ) from None


def from_table(path: Path, text: Iterator[str]) -> Iterator[Record]:
    """Of CSV."""
    csv.field_size_limit(_LONGEST_CELL)
    lines = (line + "\n" for line in _lines(text))
    rows = csv.reader(lines, delimiter=TABLES[kind_of(path)], strict=True)
    try:
        names = [name.removeprefix("\ufeff") for name in next(rows, [])]
        if text_of(dict.fromkeys(names, "")) is None or len({*names}) < len(names):
            raise SourceError(
                f"{path}: expected a column named text (or prompt and completion), once; found "
                f"{', '.join(names)[:80]}; a file named .txt is read as it is"
            )
        for row in filter(None, rows):  # an empty line is none
            where = f"{path}:{rows.line_num}"
            if len(row) != len(names):
                raise SourceError(
                    f"{where}: {len(row)} columns, expected {len(names)}; what has a separator in "
                    "it has to stand in quotes"
                )
            yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise SourceError(f"{path}:{rows.line_num}: not CSV ({error})") from None


def _lines(text: Iterator[str]) -> Iterator[str]:
    begun: list[str] = []
    for some in text:
        first, *more = some.split("\n")
        begun.append(first)
        for line in more:
            yield "".join(begun)
            begun = [line]
    yield "".join(begun)


def _instead(record: Any) -> str:
    """What a record is that says nothing."""
    if isinstance(record, list):
        return "; found an array: write one object a line, or an array of objects"
    keys = ", ".join(record)[:80] if isinstance(record, dict) else ""
    if isinstance(record, dict) and {"instruction", "output"} <= record.keys():
        keys += ": name instruction (and input) prompt, and output completion"
    return f"; found {keys}" if keys else ""
