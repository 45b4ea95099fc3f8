"""Parts of sentences that several checks use."""

from collections.abc import Sequence

_SHOWN = 3


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are: `a, b, c and 5 more`."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def count(number: int, what: str) -> str:
    """`1 tensor`, `2 tensors`; matrix has its own plural."""
    if number == 1:
        return f"1 {what}"
    plural = what.removesuffix("ix") + "ices" if what.endswith("matrix") else what + "s"
    return f"{number:,} {plural}"
