"""What a table is on a terminal of any width: figures are whole, and names are folded."""

import io

import pytest
from rich.console import Console

from qtool.cli.tables import print_table
from qtool.messages.table import Table

NAME = "out/of/a/long/path/w4g128-awq-gptq"
FIGURES = ("230,836,264", "38.061", "0.08301", "0.00682", "0.7748", "83.94%", "*")
TITLES = ("artifact", "bytes", "perplexity", "KLD", "+-", "p99", "same top", "front")
NARROWEST = 75  # a table of these figures and ten letters of a name


def printed(width: int, name: str = NAME) -> list[str]:
    file = io.StringIO()
    print_table(Table(TITLES, [(name, *FIGURES)], 1), Console(file=file, width=width))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 66, 72, 80, 100, 200])
def test_figures_are_whole_and_nothing_of_a_name_is_lost(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= max(width, NARROWEST)
    words = [line.split() for line in lines]
    assert all(part in words[1] for title in TITLES[1:] for part in title.split())
    start = next(number for number, line in enumerate(words) if FIGURES[0] in line)
    assert all(figure in words[start] for figure in FIGURES)
    assert "".join(line[0] for line in words[start:] if line) == NAME


def test_tables_without_rows_or_figures() -> None:
    file = io.StringIO()
    print_table(Table(("a", "b"), [], 1), Console(file=file, width=3))
    print_table(Table(("a",), [("x" * 30,)], 1), Console(file=file, width=12))
    assert file.getvalue().count("x") == 30


def test_names_are_neither_markup_nor_control_characters() -> None:
    lines = printed(200, "[bold]x[/bold]\x1b[31m")
    assert any("[bold]x[/bold]\\x1b[31m" in line for line in lines)
