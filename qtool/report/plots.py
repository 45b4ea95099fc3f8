"""Charts of a page: size against divergence, a swept setting, histograms, ranges of scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qtool.report import figures, svg
from qtool.report.facts import ArtifactFacts, Codes, Component, Scales, Sweep
from qtool.report.markup import Markup, element
from qtool.report.names import COMPONENTS
from qtool.report.sample import binned, ends, entropy

_LEAST = 1e-9  # a divergence of 0 has no logarithm


def _logarithmic(values: Sequence[float]) -> tuple[float, float]:
    """Half decades around the logarithms."""
    logs = [math.log10(max(value, _LEAST)) for value in values]
    return math.floor(min(logs) * 2) / 2, math.ceil(max(logs) * 2 + 0.01) / 2


def _divergences(low: float, high: float) -> svg.Axis:
    step = 1 if round((high - low) * 2) <= 8 else 2 * math.ceil((high - low) / 4)
    halves = range(round(low * 2), round(high * 2) + 1, step)
    ticks = tuple(((half / 2 - low) / (high - low), f"{10 ** (half / 2):.2g}") for half in halves)
    return svg.Axis("KL divergence, nats", ticks)


def _axis(title: str, low: float, high: float, unit: float = 1.0) -> svg.Axis:
    """At most six round numbers between two."""
    spread = (high - low) / unit
    power = 10.0 ** math.floor(math.log10(spread / 5))
    step = next(power * k for k in (1, 2, 5, 10) if spread / (power * k) <= 6)
    first = math.ceil(low / unit / step)
    ticks = []
    while first * step <= high / unit * (1 + 1e-12):
        ticks.append(((first * step * unit - low) / (high - low), f"{first * step:.6g}"))
        first += 1
    return svg.Axis(title, tuple(ticks))


@dataclass(frozen=True)
class Point:
    """One artifact of a plot of sizes and divergences."""

    name: str  # a number, or another short name
    label: str
    nbytes: int
    kld: float
    front: bool  # nothing in the plot is both smaller and nearer


def pareto(points: Sequence[Point], *, alone: bool = False) -> Markup:
    """Size against the logarithm of the KL divergence; alone: as a file with names below."""
    sizes = [point.nbytes for point in points]
    spread = (max(sizes) - min(sizes)) or max(*sizes, 1)
    left, right = min(sizes) - 0.08 * spread, max(sizes) + 0.08 * spread
    low, high = _logarithmic([point.kld for point in points])
    dots = [
        svg.Dot(
            (point.nbytes - left) / (right - left),
            (math.log10(max(point.kld, _LEAST)) - low) / (high - low),
            point.name,
            f"{point.label}: {figures.size(point.nbytes)}, KL divergence {point.kld:z.5f} nats",
            point.front,
        )
        for point in points
    ]
    return svg.chart(
        f"Size and KL divergence of {figures.plural(len(points), 'artifact', 'artifacts')}",
        _axis(
            *(("size, GB", left, right, 1e9) if right >= 1e10 else ("size, MB", left, right, 1e6))
        ),
        _divergences(low, high),
        dots,
        sorted((dot.x, dot.y) for dot in dots if dot.strong),
        below=[f"{point.name}  {point.label}" for point in points] if alone else None,
    )


def sweep(found: Sweep) -> Markup:
    """The divergence against the setting that differs."""
    values = [value for value, _, _ in found.points]
    spread = (values[-1] - values[0]) or 1.0
    left, right = values[0] - 0.05 * spread, values[-1] + 0.05 * spread
    low, high = _logarithmic([kld for _, kld, _ in found.points])
    best = min(kld for _, kld, _ in found.points)
    dots = [
        svg.Dot(
            (value - left) / (right - left),
            (math.log10(max(kld, _LEAST)) - low) / (high - low),
            f"{kld:.3g}" if kld == best else "",
            f"{found.key} {value:g}: KL divergence {kld:z.5f} nats ({artifact})",
            kld == best,
        )
        for value, kld, artifact in found.points
    ]
    return svg.chart(
        f"KL divergence against {found.key}",
        _axis(found.key, left, right),
        _divergences(low, high),
        dots,
        [(dot.x, dot.y) for dot in dots],
        260,
    )


def components(named: str, parts: Sequence[Component], whole: int, nbytes: int) -> Markup:
    """One bar of sizes under its name."""
    said = f"{named}: " + ", ".join(f"{part.name} {figures.size(part.nbytes)}" for part in parts)
    bar = svg.stacked(
        [
            (part.name, part.nbytes, f"{part.name}: {figures.size(part.nbytes)}"
             + (f", {8 * part.nbytes / part.parameters:.2f} bits per weight"
                if part.parameters else ""))
            for part in parts
        ],
        whole,
        said,
    )  # fmt: skip
    return element(
        "div",
        element("p", named, element("span", f" {figures.size(nbytes)}", class_="faint")),
        bar,
        class_="sized",
    )


def histogram(codes: Codes) -> Markup:
    """One kind's codes."""
    bars = binned(codes)
    total = codes.total or 1
    said = f"{codes.kind}, {codes.scheme}: how often each of {len(codes.counts)} codes occurs"
    carried = entropy(codes)
    width = math.log2(len(codes.counts))
    return element(
        "figure",
        svg.bars([(f"{name}: {100 * n / total:.2f} %", n) for name, n in bars], said),
        element(
            "div",
            *(element("span", end) for end in ends(codes)),
            class_="ends",
        ),
        element(
            "figcaption",
            element("b", codes.kind),
            f" {codes.scheme}; {codes.sampled} of {codes.matrices}; carries {carried:.2f} of "
            f"{width:.0f} bits",
        ),
    )


def scale_ranges(rows: Sequence[Scales]) -> Markup:
    """Lowest, median and highest scale of each kind, on one logarithmic axis."""
    good = [row for row in rows if row.high > 0]
    if not good:
        return element("p", "No scale is a positive number.")
    low = math.floor(min(math.log10(row.low) for row in good))
    high = max(low + 1, math.ceil(max(math.log10(row.high) for row in good)))

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    kinds = [row.kind for row in good]
    parts: list[Markup] = []
    for row in good:
        more = [element("small", f" {row.scheme}")] if kinds.count(row.kind) > 1 else []
        said = f"{row.kind}, {row.scheme}: {row.low:.3g} to {row.high:.3g}, median {row.median:.3g}"
        parts += [
            element("span", row.kind, *more),
            svg.span(at(row.low), at(row.median), at(row.high), said),
        ]
    step = max(1, math.ceil((high - low) / 6))
    ticks = [
        svg.tick((power - low) / (high - low), 12, f"1e{power}")
        for power in range(low, high + 1, step)
    ]
    axis = element("svg", *ticks, class_="draw", width="100%", height=16, aria_hidden="true")
    return element("div", *parts, element("span", "scale"), axis, class_="rows ranges")


def legend(artifacts: Sequence[ArtifactFacts], more: Sequence[Component] = ()) -> Markup:
    """The colours of the components that occur."""
    there = {part.name for one in artifacts for part in one.components}
    there |= {part.name for part in more}
    return element(
        "div",
        *(
            element("span", element("span", "", class_=f"swatch {name}"), name)
            for name in COMPONENTS
            if name in there
        ),
        class_="legend",
    )
