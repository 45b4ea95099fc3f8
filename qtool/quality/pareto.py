"""Artifacts side by side: which of them no other beats in both size and quality; also as SVG."""

import math
from collections.abc import Sequence
from html import escape

from qtool.quality.evaluate import Evaluation

_WIDTH, _HEIGHT, _MARGIN = 640, 400, 56


def front(found: Sequence[Evaluation]) -> set[str]:
    """Names of those for which every other one is larger, or has a higher KL divergence."""
    return {
        one.artifact
        for one in found
        if math.isfinite(_kld(one))
        and not any(
            other.size_bytes <= one.size_bytes
            and _kld(other) <= _kld(one)
            and (other.size_bytes, _kld(other)) != (one.size_bytes, _kld(one))
            for other in found
        )
    }


def _kld(one: Evaluation) -> float:
    return float(one.found["kld"]["mean"])


def svg(found: Sequence[Evaluation]) -> str:
    """Size against the logarithm of KL divergence, the front joined by a line; no scripts."""
    best = front(found)
    sizes = [one.size_bytes / 1e6 for one in found]
    # A model against itself has a divergence of 0, which has no logarithm.
    logs = [math.log10(max(_kld(one), 1e-9)) for one in found]
    left, right = min(sizes) * 0.95, max(sizes) * 1.05
    bottom, top = math.floor(min(logs) * 2) / 2, math.ceil(max(logs) * 2 + 0.01) / 2

    def x(size: float) -> float:
        return _MARGIN + (size - left) / (right - left) * (_WIDTH - _MARGIN - 24)

    def y(log: float) -> float:
        return _HEIGHT - _MARGIN - (log - bottom) / (top - bottom) * (_HEIGHT - _MARGIN - 24)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>size and KL divergence</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">size, MB</text>',
        f'<text transform="translate(14 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        "KL divergence, nats</text>",
    ]
    for step in range(5):
        size = left + (right - left) * step / 4
        parts.append(
            f'<line x1="{x(size):.1f}" x2="{x(size):.1f}" y1="24" y2="{_HEIGHT - _MARGIN}" '
            f'stroke="#ddd"/><text x="{x(size):.1f}" y="{_HEIGHT - _MARGIN + 16}" '
            f'text-anchor="middle">{size:.0f}</text>'
        )
    for half in range(round(bottom * 2), round(top * 2) + 1):
        at = y(half / 2)
        parts.append(
            f'<line x1="{_MARGIN}" x2="{_WIDTH - 24}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
            f'<text x="{_MARGIN - 6}" y="{at + 4:.1f}" text-anchor="end">{10 ** (half / 2):.2g}'
            "</text>"
        )
    joined = sorted(
        (size, log) for one, size, log in zip(found, sizes, logs, strict=True)
        if one.artifact in best
    )  # fmt: skip
    points = " ".join(f"{x(size):.1f},{y(log):.1f}" for size, log in joined)
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1668b8" stroke-width="1.5"/>')
    for one, size, log in zip(found, sizes, logs, strict=True):
        colour = "#1668b8" if one.artifact in best else "#888"
        anchor = "end" if x(size) > _WIDTH * 0.7 else "start"
        shift = -8 if anchor == "end" else 8
        parts.append(
            f'<circle cx="{x(size):.1f}" cy="{y(log):.1f}" r="4" fill="{colour}"/>'
            f'<text x="{x(size) + shift:.1f}" y="{y(log) - 6:.1f}" text-anchor="{anchor}">'
            f"{escape(one.artifact.rsplit('/', 1)[-1])}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
