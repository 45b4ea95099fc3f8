"""HTML and SVG, put together so that text from a file cannot become markup.

`element` escapes every child that is not Markup already and every attribute; what could move a
cursor, end a document or turn the direction of writing is shown as an escape.
"""

from __future__ import annotations

from html import escape

from qtool.messages.printable import printable

_VOID = frozenset({"br", "col", "hr", "meta"})


class Markup(str):
    """Text that is markup; everything else is escaped when it becomes a child."""

    __slots__ = ()


def text(value: str) -> Markup:
    """A string as it is to be read."""
    return value if isinstance(value, Markup) else Markup(escape(printable(value)))


def dotted(name: str) -> Markup:
    """A name that may be broken after its dots and underscores."""
    return Markup(text(name).replace(".", ".<wbr>").replace("_", "_<wbr>"))


def join(parts: list[Markup]) -> Markup:
    """One after the other, a line each."""
    return Markup("\n".join(parts))


def element(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """<name attribute="...">children</name>; class_ is class, stroke_width is stroke-width."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = coordinate(value) if isinstance(value, float | int) else value
            words.append(f'{key.rstrip("_").replace("_", "-")}="{text(shown)}"')
    opened = " ".join(words)
    if name in _VOID:
        return Markup(f"<{opened}>")
    return Markup(f"<{opened}>{''.join(text(child) for child in children)}</{name}>")


def key(number: int) -> Markup:
    """The number that stands for an artifact in drawings."""
    return element("span", str(number), class_="key")


def named(number: int, label: str, several: bool) -> Markup:
    """A label, with its number where there are others."""
    return Markup(key(number) + " " + element("span", label)) if several else element("span", label)


def coordinate(value: float) -> str:
    """A coordinate: at most two decimals, none that are zero."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
