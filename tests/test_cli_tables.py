"""What a table is on a terminal of any width: figures are whole, and names are folded."""

import io

import pytest
from rich.console import Console

from qtool.cli.tables import print_table
from qtool.table import Table

NAME = "out/of/a/long/path/w4g128-awq-gptq"
FIGURES = ("230,836,264", "38.061", "0.08301", "0.00682", "0.7748", "83.94%", "*")
TITLES = ("artifact", "bytes", "perplexity", "KLD", "+-", "p99", "same top", "front")


def printed(width: int, name: str = NAME) -> list[list[str]]:
    """Words of each line."""
    file = io.StringIO()
    print_table(Table(TITLES, [(name, *FIGURES)], 1), Console(file=file, width=width))
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return [line.split() for line in lines]


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_figures_are_whole(width: int) -> None:
    words = [word for line in printed(width) for word in line]
    assert all(figure in words for figure in FIGURES)
    assert all(part in words for title in TITLES[1:] for part in title.split())


@pytest.mark.parametrize("width", [80, 200])
def test_names_are_folded_and_nothing_of_them_is_lost(width: int) -> None:
    lines = printed(width)
    start = next(number for number, line in enumerate(lines) if FIGURES[0] in line)
    assert "".join(line[0] for line in lines[start:] if line) == NAME


def test_what_looks_like_markup_is_a_name() -> None:
    assert any("[bold]x[/bold]" in line for line in printed(200, "[bold]x[/bold]"))
