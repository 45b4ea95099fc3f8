"""What files of records say: one text or one chat after the other.

A record is {"text": ...}, {"prompt": ..., "completion": ...}, one behind the other, a string, or a
chat (qtool.texts.chats). It is a line of JSONL, an element of a JSON array, a row of CSV or of
Parquet. One whose text is null says nothing, in JSON as in Parquet.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from qtool.errors import SourceError
from qtool.texts.chats import LISTS, PAIR, Chat, chat_of
from qtool.texts.stored import TABLES, kind_of

TEXT = "text"
Record = tuple[str, Any]  # where it is, and what it is
_LONGEST_CELL = 1 << 30  # characters
_LONGEST_ELEMENT = 1 << 26  # or line of JSONL
_PAIRS = {("instruction", "output"): "instruction (and input)", ("question", "answer"): "question"}
_NEAR = 16  # characters at the end of what is held, where an error may be for want of more
_NO_SPACE = re.compile("[^ \\t\\n\\r]")
_DECODER = json.JSONDecoder()
_TYPES = {
    str: "a string", int: "a number", float: "a number", bool: "true or false", list: "an array",
    dict: "an object", type(None): "null", bytes: "bytes",
}  # fmt: skip
_EXPECTED = (
    "expected an object whose `text` is a string (or `prompt` and `completion` are), a string "
    "alone, or a chat whose `messages` (or `conversations`) are a list"
)


def texts_and_chats(records: Iterator[Record]) -> Iterator[str | Chat]:
    """What each record says; SourceError where it says neither."""
    for where, record in records:
        plain = text_of(record)
        found = chat_of(record, where) if plain is None else plain
        if found is not None:
            yield found
        elif not _is_empty(record):
            raise SourceError(f"{where}: {_EXPECTED}{_instead(record)}")


def _is_empty(record: Any) -> bool:
    """Whether it has a place for a text or a chat, and null there."""
    if not isinstance(record, dict):
        return False
    said = [record[key] for key in (TEXT, *PAIR, *LISTS) if key in record]
    return bool(said) and all(one is None for one in said)


def text_of(record: Any) -> str | None:
    """What a record says that is no chat; None for all others."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        return None
    if isinstance(text := record.get(TEXT), str):
        return text
    parts = [record.get(key) for key in PAIR]
    said = [part for part in parts if isinstance(part, str)]
    return "".join(said) if len(said) == len(parts) else None


def check_columns(path: Path, names: list[str], chats: bool) -> None:
    """SourceError where rows of a table cannot be records, by its columns; chats: may be some."""
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise SourceError(f"{path}: several columns are named {twice[0][:40]}")
    one_of = [{TEXT}, {*PAIR}, *({name} for name in LISTS if chats)]
    if not any(some <= {*names} for some in one_of):
        or_chats = f", {' or '.join(LISTS)}" if chats else ""
        found = f"found {', '.join(names)[:80]}{renamed(names)}" if names else "it is empty"
        raise SourceError(
            f"{path}: expected a column named {TEXT} (or {' and '.join(PAIR)}){or_chats}; {found}"
        )


def renamed(names: Iterable[str]) -> str:
    """How other names could be written that say the same, for the end of a sentence."""
    there = {*names}
    for pair, said in _PAIRS.items():
        if {*pair} <= there:
            return f": name {said} {PAIR[0]}, and {pair[1]} {PAIR[1]}"
    alike = [name for name in there if name.lower() in (TEXT, "texts", "content")]
    return f": name {alike[0]} {TEXT}" if len(alike) == 1 else ""


def from_json(path: Path, text: Iterator[str]) -> Iterator[Record]:
    """Of a file of JSON: an object a line, or an array of objects."""
    lines, begin = 0, ""
    while not begin.strip() and (some := next(text, None)) is not None:
        lines += begin.count("\n")
        begin = some.removeprefix("\ufeff")
    array = begin.lstrip().startswith("[")
    of = _elements if array else partial(_lines_of_json, first=lines + 1)
    for where, record in of(path, chain((begin,), text)):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"{where}: its text has half of a surrogate pair, which is no character"
            ) from None
        yield where, record


def _lines_of_json(path: Path, text: Iterator[str], first: int) -> Iterator[Record]:
    for number, line in enumerate(_lines(text, f"{path}: a line"), start=first):
        if line.strip():
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                within = isinstance(error, json.JSONDecodeError) and error.pos >= len(line.rstrip())
                raise SourceError(
                    f"{where}: not JSON{', or broken off' if within else ''}; expected one object "
                    f"a line with `{TEXT}` or `messages`, or an array of such objects"
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
            except RecursionError:
                raise SourceError(
                    f"{where}: not JSON that can be read: nested too deeply"
                ) from None
            except json.JSONDecodeError as error:
                near = error.pos >= len(self._held) - _NEAR
                if not near and not error.msg.startswith("Unterminated string"):
                    raise SourceError(f"{where}: not JSON ({error.msg})") from None
            except ValueError as error:  # of a number that is too long
                raise SourceError(f"{where}: not JSON ({error})") from None
            if not self._more():
                raise SourceError(f"{where}: the file ends within it; is it whole?")
            if len(self._held) > _LONGEST_ELEMENT:
                raise SourceError(
                    f"{where}: longer than {_LONGEST_ELEMENT >> 20} million characters; write its "
                    "text in parts"
                )

    def _more(self) -> bool:
        """Whether there is more, of which as much is read as is held."""
        parts, there = [self._held[self._at :]], 0
        while there <= len(parts[0]) and (some := next(self._text, "")):
            parts.append(some)
            there += len(some)
        self._held, self._at = "".join(parts), 0
        return there > 0


def from_table(path: Path, text: Iterator[str]) -> Iterator[Record]:
    """Of CSV."""
    csv.field_size_limit(_LONGEST_CELL)
    lines = (line + "\n" for line in _lines(text))
    rows = csv.reader(lines, delimiter=TABLES[kind_of(path)], strict=True)
    try:
        names = [name.removeprefix("\ufeff") for name in next(rows, [])]
        try:
            check_columns(path, names, chats=False)
        except SourceError as error:
            raise SourceError(f"{error}; a file named .txt is read as it is") from None
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


def _lines(text: Iterator[str], what: str = "") -> Iterator[str]:
    """what: is not to be longer than an element may be."""
    begun: list[str] = []
    held = 0
    for some in text:
        first, *more = some.split("\n")
        begun.append(first)
        held += len(first)
        for line in more:
            yield "".join(begun)
            begun, held = [line], len(line)
        if what and held > _LONGEST_ELEMENT:
            raise SourceError(
                f"{what} is longer than {_LONGEST_ELEMENT >> 20} million characters; expected one "
                "object a line"
            )
    yield "".join(begun)


def _instead(record: Any) -> str:
    """What a record is that says nothing."""
    if not isinstance(record, dict):
        return f"; found {_TYPES.get(type(record), 'something else')}"
    if TEXT in record:
        return f"; its `{TEXT}` is {_TYPES.get(type(record[TEXT]), 'something else')}"
    others = {key: value for key, value in record.items() if key not in (*PAIR, *LISTS)}
    lists = [key for key, value in others.items() if isinstance(value, list) and value]
    found = f"; found {', '.join(record)[:80]}{renamed(record)}" if record else ""
    if len(lists) == 1 and isinstance(record[lists[0]][0], dict) and not renamed(record):
        found += f"; if what is under {lists[0][:40]} is meant, save that alone"
    return found
