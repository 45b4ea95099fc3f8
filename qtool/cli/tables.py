"""Tables on a terminal: where it is narrow names are folded, and figures never cut."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from qtool.table import Table

_PIPED = 200  # columns: a pipe has no width, and cut names are of no use
_LEAST = 16  # columns that names should have left, or what stands between columns is narrowed


def console() -> "Console":
    """Of stdout."""
    from rich.console import Console

    found = Console(highlight=False)
    if not found.is_terminal:
        found.width = _PIPED
    return found


def print_table(table: "Table", where: "Console | None" = None) -> None:
    """Its texts may be folded."""
    from rich import box
    from rich import table as rich_table
    from rich.text import Text

    where = console() if where is None else where
    gaps = 3 * len(table.titles)
    rows: Sequence[Sequence[str]] = [table.titles, *table.rows]
    figures = sum(max(len(row[c]) for row in rows) for c in range(table.texts, len(table.titles)))
    tight = where.width < gaps + figures + _LEAST * table.texts
    shown = rich_table.Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0) if tight else (0, 1)
    )
    for column, title in enumerate(table.titles):
        if column < table.texts:
            shown.add_column(title, overflow="fold")
        else:
            shown.add_column(title, justify="right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    where.print(shown)
