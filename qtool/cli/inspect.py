"""`qtool inspect`: what an artifact is, without loading it."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qtool.inspect import Inspection

_TITLES = ("tensor", "shape", "dtype", "scheme", "bits/weight", "bytes")


def inspect(
    artifact: Annotated[Path, typer.Argument(help="a checkpoint folder or a safetensors file")],
    tensor: Annotated[
        str | None, typer.Option(help="read one tensor: ranges and a histogram of its codes")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="a row for every tensor")] = False,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Say what ARTIFACT is: format, scheme, bits per weight, tensors, provenance."""
    from qtool.artifact import Artifact
    from qtool.inspect import detail_lines, tensor_detail
    from qtool.inspect import inspect as look

    if tensor is not None:
        detail = tensor_detail(Artifact.open(artifact), tensor)
        if json_:
            typer.echo(json.dumps(detail))
        else:
            for line in detail_lines(detail):
                typer.echo(line)
        return
    found = look(artifact)
    if json_:
        typer.echo(json.dumps(found.json()))
    elif sys.stdout.isatty():
        _print_table(found, all_)
    else:
        _print_plain(found, all_)


def _print_plain(found: "Inspection", every: bool) -> None:
    """Columns of spaces, for pipes; needs no imports."""
    for label, value in found.summary():
        typer.echo(f"{label}: {value}")
    rows = [_TITLES, *found.rows(every)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 4 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())


def _print_table(found: "Inspection", every: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    head = Table(box=None, show_header=False, pad_edge=False)
    for label, value in found.summary():
        head.add_row(Text(label, style="bold"), Text(value))
    console.print(head)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, title in enumerate(_TITLES):
        table.add_column(title, overflow="fold", justify="left" if column < 4 else "right")
    for row in found.rows(every):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
