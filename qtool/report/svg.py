"""Drawings that fit any width: horizontal places are shares of it, vertical ones are pixels.

There is no viewBox, so that letters keep their size on a telephone. Colours are classes, which the
page's style gives values for light, dark and paper. Every drawing has a title, and every mark one
that says its numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from qtool.report.markup import Markup, element

_FINE = 48
LEVELS = 9  # of the ramp of a heat map, h0 to h8


def percent(share: float) -> str:
    """A share of the width."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def titled(said: str, *rest: Markup) -> tuple[Markup, ...]:
    """A mark's children: its title first."""
    return (element("title", said), *rest)


def drawing(said: str, height: float, *marks: Markup, class_: str = "draw") -> Markup:
    """An svg as wide as the place it stands in."""
    return element(
        "svg", element("title", said), *marks, class_=class_, role="img", width="100%",
        height=height, aria_label=said,
    )  # fmt: skip


def box(
    left: float, top: float, width: float, height: float, class_: str, said: str | None = None
) -> Markup:
    """A rectangle; left and width are shares."""
    children = () if said is None else titled(said)
    return element(
        "rect", *children, x=percent(left), y=top, width=percent(width), height=height,
        class_=class_,
    )  # fmt: skip


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """x1 and x2 are shares."""
    return element("line", x1=percent(x1), y1=y1, x2=percent(x2), y2=y2, class_=class_)


def label(at: float, top: float, words: str, class_: str = "tick", shift: float = 0) -> Markup:
    """Text at a share of the width, moved by some pixels."""
    return element("text", words, x=percent(at), y=top, dx=shift or None, class_=class_)


def tick(at: float, top: float, words: str) -> Markup:
    """The label of a place on an axis; those at its ends stay inside."""
    side = "start" if at < 0.02 else "end" if at > 0.98 else "middle"
    return label(at, top, words, f"tick {side}")


def dot(at: float, top: float, radius: float, class_: str, said: str) -> Markup:
    """A circle with a title."""
    return element("circle", *titled(said), cx=percent(at), cy=top, r=radius, class_=class_)


def stacked(parts: Sequence[tuple[str, float, str]], whole: float, said: str) -> Markup:
    """One bar: (class, size, title) of each part; the width stands for `whole`."""
    marks, start = [], 0.0
    for class_, size, title in parts:
        marks.append(box(start / whole, 1, size / whole, 22, f"part {class_}", title))
        start += size
    return drawing(said, 24, *marks)


def strip(cells: Sequence[tuple[int | None, str]], said: str) -> Markup:
    """A row of a heat map: level (None where there is nothing) and title of each cell."""
    width = 1 / max(1, len(cells))
    marks = [
        box(place * width, 0, width, 22, "none" if level is None else f"cell h{level}", title)
        for place, (level, title) in enumerate(cells)
    ]
    # Where cells are a few pixels wide, lines between them would be most of the picture.
    return drawing(said, 22, *marks, class_="draw fine" if len(cells) > _FINE else "draw")


def numbers_below(count: int, most: int = 8) -> Markup:
    """The numbers of a strip's columns, some of them."""
    step = next(s for s in _steps() if -(-count // s) <= most)
    marks = [
        label((column + 0.5) / count, 12, str(column), "tick middle")
        for column in range(0, count, step)
    ]
    return element("svg", *marks, class_="draw", width="100%", height=16, aria_hidden="true")


def _steps() -> list[int]:
    return [factor * 10**power for power in range(7) for factor in (1, 2, 5)]


def level(value: float, low: float, high: float) -> int:
    """Which of LEVELS a value is."""
    if high <= low:
        return LEVELS // 2
    return max(0, min(LEVELS - 1, int(LEVELS * (value - low) / (high - low))))


def ramp() -> Markup:
    """The key of a heat map."""
    marks = [box(place / LEVELS, 0, 1 / LEVELS, 12, f"cell h{place}") for place in range(LEVELS)]
    return element("svg", *marks, class_="draw", width="100%", height=12, aria_hidden="true")


def bars(counts: Sequence[tuple[str, float]], said: str, height: float = 64) -> Markup:
    """A histogram: (title, size) of each bar."""
    most = max((size for _, size in counts), default=0) or 1
    width = 1 / max(1, len(counts))
    gap = 0.12 * width if len(counts) <= 32 else 0
    marks = [
        box(
            place * width + gap / 2, height - size / most * (height - 2), width - gap,
            size / most * (height - 2), "bar", title,
        )
        for place, (title, size) in enumerate(counts)
    ]  # fmt: skip
    return drawing(said, height, *marks, line(0, height, 1, height, "axis"))


def span(low: float, middle: float, high: float, title: str) -> Markup:
    """A range with its median; all three are shares."""
    marks = (
        line(0, 11, 1, 11, "grid"),
        line(low, 11, high, 11, "range"),
        line(low, 6, low, 16, "range"),
        line(high, 6, high, 16, "range"),
        dot(middle, 11, 4.5, "mark", title),
    )
    return drawing(title, 22, *marks)


@dataclass(frozen=True)
class Axis:
    """Where ticks are, as shares, and what they say."""

    title: str
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Dot:
    """A point of a chart, both coordinates as shares from the lower left."""

    x: float
    y: float
    name: str  # a number or a few letters
    said: str
    strong: bool


_LEFT, _RIGHT, _TOP, _BOTTOM = 0.15, 0.97, 26.0, 36.0
# The style of a drawing that stands alone: that of the page on paper.
_ALONE = """
svg { font: 12px sans-serif; } text { fill: #444; } .name { fill: #000; } .paper { fill: #fff; }
.middle { text-anchor: middle; } .end { text-anchor: end; } .grid { stroke: #ccc; }
.front { stroke: #0072b2; stroke-width: 1.5; } .mark { fill: #0072b2; } .weak { fill: #777; }
"""
_NARROW = 300  # pixels; names must not meet on a telephone


def chart(
    said: str, x: Axis, y: Axis, dots: Sequence[Dot], joined: Sequence[tuple[float, float]],
    height: float = 300, below: Sequence[str] | None = None,
) -> Markup:  # fmt: skip
    """Points and a line through some places, on a grid.

    below: lines of text; with them the drawing is a file of its own, of 640 pixels.
    """

    def across(share: float) -> float:
        return _LEFT + share * (_RIGHT - _LEFT)

    def down(share: float) -> float:
        return round(_TOP + (1 - share) * (height - _TOP - _BOTTOM), 2)

    marks = []
    for at, words in x.ticks:
        marks.append(line(across(at), _TOP, across(at), height - _BOTTOM, "grid"))
        marks.append(label(across(at), height - _BOTTOM + 15, words, "tick middle"))
    for at, words in y.ticks:
        marks.append(line(_LEFT, down(at), _RIGHT, down(at), "grid"))
        marks.append(label(_LEFT, down(at) + 4, words, "tick end", -6))
    marks.append(label(across(0.5), height - 4, x.title, "tick middle"))
    marks.append(label(0, 12, y.title))
    for (x1, y1), (x2, y2) in pairwise(joined):
        marks.append(line(across(x1), down(y1), across(x2), down(y2), "front"))
    taken: list[tuple[float, float]] = [(across(one.x) * _NARROW, down(one.y)) for one in dots]
    for one in dots:
        class_ = "mark" if one.strong else "weak"
        marks.append(dot(across(one.x), down(one.y), 5, class_, one.said))
        shift, rise = _room(across(one.x) * _NARROW, down(one.y), one.name, taken)
        marks.append(
            element(
                "text", one.name, x=percent(across(one.x)), y=down(one.y) + rise, dx=shift,
                class_="name middle",
            )
        )  # fmt: skip
        taken.append((across(one.x) * _NARROW + shift, down(one.y) + rise - 4))
    if below is None:
        return drawing(said, height, *marks)
    for place, words in enumerate(below, 1):
        marks.append(label(0.02, height + 18 * place, words, "name"))
    whole = height + 18 * len(below) + 12
    return element(
        "svg", element("title", said), element("style", Markup(_ALONE)),
        element("rect", class_="paper", width="100%", height="100%"), *marks,
        xmlns="http://www.w3.org/2000/svg", width=640, height=whole, role="img",
    )  # fmt: skip


def _room(
    x: float, y: float, name: str, taken: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Where a name beside (x, y) meets nothing: what to add to x, and to the base line y."""
    wide = 8 + 3.7 * len(name)  # to the middle of the name
    places = (
        (wide, 4), (-wide, 4), (0, -9), (0, 18), (wide, -8), (-wide, -8), (wide, 16), (-wide, 16)
    )  # fmt: skip

    def free(place: tuple[float, float]) -> float:
        at = x + place[0], y + place[1] - 4
        near = [abs(at[0] - tx) + abs(at[1] - ty) for tx, ty in taken if (tx, ty) != (x, y)]
        inside = wide / 2 < at[0] < _NARROW - wide / 2
        return min([*near, 18.0]) if inside else 0.0

    return max(places, key=free)  # the first of equal ones
