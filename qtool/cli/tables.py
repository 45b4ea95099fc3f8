"""Tables on a terminal: where it is narrow names are folded, and figures never cut.

A terminal that is narrower than figures and some letters of each name folds lines itself."""

from typing import TYPE_CHECKING

from qtool.messages.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from qtool.messages.table import Table

_PIPED = 200  # columns: a pipe has no width, and cut names are of no use
_ENOUGH = 16  # columns that names should have left, or what stands between columns is narrowed
_LEAST = 10  # that they have


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
    from rich.cells import cell_len
    from rich.text import Text

    where = console() if where is None else where
    rows = [[printable(cell) for cell in row] for row in (table.titles, *table.rows)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    figures = sum(widths[table.texts :])
    tight = where.width < 3 * len(widths) + figures + _ENOUGH * table.texts
    least = figures + len(widths) + 1 + sum(min(one, _LEAST) for one in widths[: table.texts])
    shown = rich_table.Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0) if tight else (0, 1)
    )
    for column, title in enumerate(table.titles):
        if column < table.texts:
            shown.add_column(title, overflow="fold", min_width=min(widths[column], _LEAST))
        else:
            shown.add_column(title, justify="right", no_wrap=True)
    for row in rows[1:]:
        shown.add_row(*map(Text, row))
    width, where.width = where.width, max(where.width, least)
    where.print(shown)
    where.width = width
