"""`qtool compare`: several artifacts of one model, by size and quality."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.options import (
    Artifacts,
    Json,
    KeptReference,
    MeasuredText,
    Protocol,
    Threads,
    WindowLength,
    Windows,
)
from qtool.errors import SourceError
from qtool.messages.sentences import count

if TYPE_CHECKING:
    from qtool.report.compared import Compared


def compare(
    artifacts: Artifacts,
    against: Annotated[
        str, typer.Option(help="the unquantized model: a folder, a hub id or an alias")
    ],
    text: MeasuredText,
    windows: Windows = None,
    length: WindowLength = 512,
    protocol: Protocol = "plain",
    plot: Annotated[Path | None, typer.Option(help="SVG to write")] = None,
    threads: Threads = None,
    cache: KeptReference = True,
    json_: Json = False,
) -> None:
    """Measure ARTIFACTS on a text, side by side, and mark the Pareto front."""
    from qtool.api import looking

    if plot is not None:
        _check_plot(plot)
    made = looking.compare(
        artifacts,
        text,
        against=against,
        windows=windows,
        length=length,
        protocol=protocol,
        threads=threads,
        cache=cache,
        quiet=json_,
    )
    if json_:
        typer.echo(json.dumps(made.json(), allow_nan=False))
    else:
        _print(made)
    if plot is not None:  # last: should it fail, the figures are there
        _write_plot(plot, made.svg())
    for error in made.failed.values():
        typer.echo(f"error: {error}", err=True)
    if made.failed:
        raise typer.Exit(1)


def _check_plot(plot: Path) -> None:
    if plot.suffix.lower() in (".png", ".jpg", ".jpeg", ".pdf"):
        raise SourceError(f"--plot {plot}: an SVG is written; name it {plot.with_suffix('.svg')}")
    if plot.exists() or plot.is_symlink():
        raise SourceError(f"{plot}: exists; remove it or choose another --plot")
    if not os.access(plot.absolute().parent, os.W_OK | os.X_OK):
        raise SourceError(
            f"{plot}: no file can be made in this folder; make it or choose another --plot"
        )


def _write_plot(plot: Path, content: str) -> None:
    try:
        with plot.open("x", encoding="utf-8") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                plot.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise SourceError(f"{plot}: cannot be written ({error.strerror})") from None


def _print(made: "Compared") -> None:
    from qtool.cli.tables import print_table
    from qtool.messages.table import Table

    titles = ("artifact", "bytes", "perplexity", "KLD", "+-", "p99", "same top", "front")
    found = made.found
    rounding = any(one.found["protocol"]["activations"] != "float32" for one in found)
    rows = []
    for one in sorted(found, key=lambda one: one.size_bytes):
        row = one.found
        bounds = row["kld"]["interval"]
        cells = (
            one.artifact,
            f"{one.size_bytes:,}",
            f"{row['perplexity']:.3f}",
            f"{row['kld']['mean']:z.5f}",
            "?" if bounds is None else f"{(bounds[1] - bounds[0]) / 2:.5f}",
            f"{row['kld']['p99']:z.4f}",
            f"{row['top1_agreement']:.2%}",
            "*" if one.artifact in made.front else "",
            *([row["protocol"]["activations"]] if rounding else []),
        )
        rows.append(cells)
    print_table(Table((*titles, "inputs") if rounding else titles, rows, 1))
    row = found[0].found
    protocol = row["protocol"]
    typer.echo(
        f"reference perplexity {row['reference_perplexity']:.3f}; {row['tokens']} positions: "
        f"{count(protocol['windows'], 'window')} of {protocol['length']} of {protocol['text']}, "
        f"protocol {protocol['name']}; +-: of KLD, 95 %; *: nothing here is both smaller and "
        "nearer" + ("; inputs: what those of linear layers are rounded to" if rounding else "")
    )
    for one in found:
        for what in one.found["protocol"]["not_simulated"]:
            typer.echo(f"{one.artifact}: not simulated: {what}")
