"""`qtool plan`: what a recipe will do to a model, before any of it is done."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qtool.plan import Plan


def plan(
    model: Annotated[str, typer.Argument(help="a folder, a hub id, or an alias such as `tiny`")],
    recipe: Annotated[str, typer.Option(help="a shipped recipe's name, or a YAML file")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value put over the recipe's own")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="calibration samples")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens in a sample")] = None,
    max_shard_size: Annotated[str, typer.Option(help="such as 5GB or 500MB")] = "5GB",
    all_: Annotated[bool, typer.Option("--all", help="a line for every tensor")] = False,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Say what RECIPE will make of MODEL: each tensor, the size, memory and time."""
    from qtool.checkpoint import Checkpoint
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import resolve
    from qtool.plan import make_plan
    from qtool.recipe import calibration_sets, load

    loaded = load(recipe, (set_ or []) + calibration_sets(None, samples, length, None))
    max_shard_bytes = parse_size(max_shard_size)  # before a download that may take hours
    made = make_plan(loaded, Checkpoint.open(resolve(model)), max_shard_bytes)
    if json_:
        typer.echo(json.dumps(made.json()))
    else:
        _print(made, all_)


def _print(made: "Plan", every: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from qtool.plan_rows import rows

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width, and cut names are of no use
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for title in ("shape", "scheme"):
        table.add_column(title, overflow="fold")
    for title in ("tensors", "bytes"):
        table.add_column(title, justify="right")
    for row in rows(made, every):
        table.add_row(row.name, row.shape, row.stored, str(row.count), f"{row.nbytes:,}")
    console.print(table, markup=False)
    counts = ", ".join(f"{count} {kind}" for kind, count in made.counts.items())
    files = len(made.layout.files)
    typer.echo(f"recipe {made.recipe.name}, format {made.format}: {counts}")
    typer.echo(
        f"size {made.size_bytes:,} bytes in {files} file{'s' if files > 1 else ''}, "
        f"{made.bits_per_weight:.3f} bits per weight, "
        f"{made.unquantized_share:.1%} of the weights left unquantized"
    )
    typer.echo(
        f"estimated: peak memory {made.peak_rss_bytes / 2**30:.1f} GiB, "
        f"time {_duration(made.seconds)} on this machine"
    )
    for warning in made.warnings:
        typer.echo(f"warning: {warning}" if not warning.startswith("note:") else warning)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
