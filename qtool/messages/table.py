"""A table that commands print."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Titles and rows; the first `texts` columns are text, the others numbers."""

    titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    texts: int
