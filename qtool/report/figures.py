"""How numbers are written: each with its unit, as many digits as mean something."""

from qtool.messages.printable import size
from qtool.report.facts import Quality

__all__ = ["bits", "error", "how", "optional", "plural", "share", "size", "small", "with_spread"]


def bits(value: float) -> str:
    return f"{value:.2f}"


def share(value: float) -> str:
    """A part of the whole."""
    return f"{100 * value:.1f} %"


def error(value: float) -> str:
    """A relative error, or another small number."""
    return f"{value:.4f}" if 1e-4 <= abs(value) < 10 or value == 0 else f"{value:.2e}"


def small(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"


def with_spread(value: float, interval: tuple[float, float] | None, digits: int) -> str:
    """A number and its 95 % interval, whose middle it need not be."""
    if interval is None or interval[0] == interval[1]:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


def optional(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def how(row: Quality) -> str:
    """On what a row was measured."""
    return (
        f"{row.tokens:,} positions: {plural(row.windows, 'window', 'windows')} of {row.length} "
        f"tokens of {row.text}, protocol {row.protocol}"
    )


def plural(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"
