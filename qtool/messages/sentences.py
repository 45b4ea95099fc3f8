"""Parts of sentences that several checks use."""

from collections.abc import Sequence

_SHOWN = 3
AGAIN = "fetch or make the artifact again"
FETCH = "fetch the model again"


def some(names: Sequence[str], of: int | None = None) -> str:
    """The first names, and how many more there are: `a, b, c and 5 more`. of: how many there are
    in all, where `names` are the first ones."""
    more = max(len(names), of or 0) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def verb(number: int, many: str, one: str) -> str:
    """The form that goes with so many: `verb(len(names), "have", "has")`."""
    return one if number == 1 else many


def count(number: int, what: str) -> str:
    """`1 tensor`, `2 tensors`; matrix and bias have their own plurals."""
    if number == 1:
        return f"1 {what}"
    plural = what.removesuffix("ix") + "ices" if what.endswith("matrix") else what + "s"
    plural = plural.replace("biass", "biases")
    return f"{number:,} {plural}"
