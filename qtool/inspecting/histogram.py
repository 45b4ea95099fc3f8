"""Histograms of codes, scales and weights, counted and drawn as bars of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

BINS = 24
_MOST_BARS = 32
_WIDE = 16.0  # where the largest is so many times the smallest, bins grow by a factor
_WIDTH = 40  # signs of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Bars:
    """A histogram to be drawn."""

    title: str
    labels: Sequence[str]
    counts: Sequence[int]

    def lines(self, blocks: bool = False) -> list[str]:
        """The title, then a line a bar; `blocks`: of block signs instead of #."""
        total, most = max(1, sum(self.counts)), max(1, *self.counts)
        width = max(9, *map(len, self.labels))
        lines = [f"  {self.title}"]
        for label, count in zip(self.labels, self.counts, strict=True):
            bar = _blocks(count / most) if blocks else "#" * round(_WIDTH * count / most)
            lines.append(f"  {label:>{width}} {100 * count / total:6.2f} %  {bar}".rstrip())
        return lines


def _blocks(share: float) -> str:
    whole, eighths = divmod(round(8 * _WIDTH * share), 8)
    return "█" * whole + (_EIGHTHS[eighths] if eighths else "")


def edges(low: float, high: float, bins: int = BINS) -> NDArray[np.float64]:
    """bins + 1 bounds from low to high; in equal ratios where all is positive and far apart."""
    if low > 0 and high > _WIDE * low:
        found = np.geomspace(low, high, bins + 1)
    else:
        found = np.linspace(low, high, bins + 1) if high > low else np.array([low, high])
    found[0], found[-1] = low, high
    return found


def of_scales(values: NDArray[Any], counts: NDArray[np.int64] | None = None) -> dict[str, Any]:
    """What --json says of scales: range, median, what is zero, negative or no number, and a
    histogram of the others. counts: how often each value occurs, once by default."""
    values = np.asarray(values).reshape(-1).astype(np.float64)
    counts = np.ones(len(values), np.int64) if counts is None else counts
    finite = np.isfinite(values)
    found: dict[str, Any] = {
        "count": int(counts.sum()),
        "not_finite": int(counts[~finite].sum()),
        "zero": int(counts[values == 0].sum()),
        "negative": int(counts[finite & (values < 0)].sum()),
    }
    values, counts = values[finite], counts[finite]
    values, counts = values[counts > 0], counts[counts > 0]
    if not len(values):
        return found
    order = np.argsort(values, kind="stable")
    middle = np.searchsorted(np.cumsum(counts[order]), (counts.sum() + 1) // 2)
    found["range"] = [float(values.min()), float(values.max())]
    found["median"] = float(values[order][middle])
    bounds = edges(*found["range"])
    number, _ = np.histogram(values, bounds if len(bounds) > 2 else 1, weights=counts)
    found["histogram"] = {
        "edges": [float(edge) for edge in bounds],
        "counts": [int(count) for count in number],
    }
    return found


def of_codes(detail: Mapping[str, Any]) -> Bars:
    """The bars of `code_counts`; many codes share bars."""
    values, counts = detail["code_values"], detail["code_counts"]
    each = -(-len(counts) // _MOST_BARS)
    labels, sums = [], []
    for first in range(0, len(counts), each):
        ends = [f"{value:.6g}" for value in (values[first], values[first : first + each][-1])]
        labels.append(ends[0] if each == 1 else f"{ends[0]}..{ends[1]}")
        sums.append(sum(counts[first : first + each]))
    return Bars("codes", labels, sums)


def of_histogram(title: str, histogram: Mapping[str, Any]) -> Bars:
    """The bars of a histogram in --json, each labelled with its lower bound."""
    lower = histogram["edges"][:-1]
    return Bars(title, [f"{edge:.4g}" for edge in lower], histogram["counts"])


def bars(detail: Mapping[str, Any]) -> list[Bars]:
    """All histograms of a tensor."""
    found = []
    if "code_counts" in detail:
        found.append(of_codes(detail))
    if "histogram" in detail.get("scales", {}):
        found.append(of_histogram("scales, from", detail["scales"]["histogram"]))
    if "histogram" in detail:
        found.append(of_histogram("values, from", detail["histogram"]))
    return found


def scale_lines(scales: Mapping[str, Any]) -> list[str]:
    """What is said of scales beside their histogram."""
    lines = []
    if "range" in scales:
        low, high = scales["range"]
        text = f"{low:.6g} to {high:.6g}, median {scales['median']:.6g}, {scales['count']:,} in all"
        lines.append(f"  scales           {text}")
    odd = ((scales["zero"], "zero"), (scales["negative"], "negative"),
           (scales["not_finite"], "not finite"))  # fmt: skip
    said = [f"{count:,} {what}" for count, what in odd if count]
    if said:
        lines.append(f"    of them        {', '.join(said)}")
    return lines


def of_values(pieces: Iterable[NDArray[Any]], low: float, high: float) -> dict[str, Any]:
    """A histogram of finite numbers between low and high, which come in pieces."""
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = np.linspace(low, high, BINS + 1)
        if not (np.diff(bounds) > 0).all():  # the range is nothing, or more than a float64 holds
            bounds = np.array([low, high])
    total = np.zeros(len(bounds) - 1, np.int64)
    for piece in pieces:
        flat = piece.reshape(-1)
        finite = flat[np.isfinite(flat)].astype(np.float64)
        if len(bounds) == 2:
            total[0] += len(finite)
        else:
            total += np.histogram(finite, bounds)[0]
    return {"edges": [float(edge) for edge in bounds], "counts": [int(n) for n in total]}


def finite_or_none(value: float) -> float | None:
    """A number that JSON can say."""
    return value if math.isfinite(value) else None
