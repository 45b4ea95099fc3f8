"""YAML as recipes use it: mappings, lists and plain scalars, each with the line it stands on.

    scalar  null | ~ | empty -> None;  true | false;  [-+]digits -> int;  a decimal number -> float;
            anything else, and everything in quotes, is a string

This is YAML 1.2's core schema: `no` is a string, `1:30` is not 90, and `1e-3` is a number.
Anchors, aliases, tags and second documents are refused, so a small file cannot grow into a large
value, and depth and size are bounded. Built on PyYAML's event stream.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from qtool.errors import RecipeError

MAX_BYTES = 1 << 16
MAX_DEPTH = 16

Value = bool | int | float | str | list["Value"] | dict[str, "Value"] | None
Path = tuple[str | int, ...]
Mark = yaml.error.Mark | Any | None  # the C scanner has a class of its own

_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


@dataclass
class Document:
    """A parsed text: its value, and where each key stands ("file:line")."""

    value: Value
    where: dict[Path, str] = field(default_factory=dict)

    def locate(self, path: Path) -> str:
        """The place of `path`, or of the nearest mapping around it."""
        while path and path not in self.where:
            path = path[:-1]
        return self.where.get(path, "")

    def at(self, path: Path) -> Value:
        """The value at `path`; None where there is nothing."""
        value = self.value
        for step in path:
            if isinstance(value, dict):
                value = value.get(str(step))
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
            else:
                return None
        return value


def scalar(text: str) -> Value:
    """The value of a plain (unquoted) scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def parse(text: str, origin: str, *, lines: bool = True) -> Document:
    """One YAML document. `origin` names the text in messages; `lines` appends :line to it."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RecipeError(
            f"{origin}: {text} is no UTF-8; rename the file that it means, or set a locale of UTF-8"
        ) from None
    if size > MAX_BYTES:
        raise RecipeError(
            f"{origin}: {size} bytes; a recipe has at most {MAX_BYTES}. Is this the file you meant?"
        )
    document = Document(None)

    def place(mark: Mark) -> str:
        return f"{origin}:{mark.line + 1}" if lines and mark is not None else origin

    events = yaml.parse(text, Loader=yaml.SafeLoader)

    def value_of(event: yaml.Event, path: Path) -> Value:
        where = place(event.start_mark)
        document.where.setdefault(path, where)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise RecipeError(f"{where}: anchors and aliases are not used in recipes; write it out")
        # "!" is the tag that PyYAML reports for nothing at all in some places.
        if (tag := getattr(event, "tag", None)) not in (None, "!"):
            raise RecipeError(f"{where}: the tag {tag} is not used in recipes; remove it")
        if len(path) > MAX_DEPTH:
            raise RecipeError(f"{where}: nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.ScalarEvent):
            return scalar(event.value) if event.style is None else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Value] = []
            while not isinstance(inner := next(events), yaml.SequenceEndEvent):
                items.append(value_of(inner, (*path, len(items))))
            return items
        if not isinstance(event, yaml.MappingStartEvent):
            raise RecipeError(f"{where}: a key, a list or a value is expected here")
        table: dict[str, Value] = {}
        while not isinstance(inner := next(events), yaml.MappingEndEvent):
            line = place(inner.start_mark)
            if not isinstance(inner, yaml.ScalarEvent):
                raise RecipeError(f"{line}: a key must be a word, not a list or a mapping")
            key = inner.value
            if key in table:
                raise RecipeError(f"{line}: {key}: the key stands twice; keep one")
            document.where[(*path, key)] = line
            table[key] = None
            table[key] = value_of(next(events), (*path, key))
        return table

    try:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if document.where:
                    where = place(event.start_mark)
                    raise RecipeError(f"{where}: a second document starts here; keep one")
                document.value = value_of(next(events), ())
    except yaml.MarkedYAMLError as error:
        line = place(error.problem_mark or error.context_mark)
        raise RecipeError(f"{line}: not YAML: {error.problem or error.context}") from None
    except (ValueError, OverflowError):  # of PyYAML's own, from an escape such as "\\UFFFFFFFF"
        raise RecipeError(f"{origin}: not YAML: an escape in quotes names no character") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}: not YAML: {' '.join(str(error).split())}") from None
    return document
