"""`qtool plan`: what a recipe will do to a model, before any of it is done."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.printable import printable

if TYPE_CHECKING:
    from qtool.gguf.planned import GgufPlan
    from qtool.gguf.recipe import GgufRecipe
    from qtool.plan import Plan
    from qtool.plan_rows import Row
    from qtool.recipe import Recipe


def plan(
    model: Annotated[
        str, typer.Argument(help="a folder, a GGUF file, a hub id, or an alias such as `tiny`")
    ],
    recipe: Annotated[str, typer.Option(help="a shipped recipe's name, or a YAML file")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value put over the recipe's own")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="calibration samples")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens in a sample")] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="such as 500MB; by default 5GB")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(help="importance matrix for GGUF, of qtool or llama-imatrix")
    ] = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="take a GGUF file that is quantized already")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="a line for every tensor")] = False,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Say what RECIPE will make of MODEL: each tensor, the size, memory and time."""
    from qtool.cli.quantize import refuse
    from qtool.recipe import Recipe, calibration_sets, load

    loaded = load(recipe, (set_ or []) + calibration_sets(None, samples, length, None))
    if isinstance(loaded, Recipe):
        refuse(loaded, "makes no GGUF file", {"--imatrix": imatrix, "--requantize": requantize})
        made = _plan(model, loaded, max_shard_size or "5GB")
        typer.echo(json.dumps(made.json())) if json_ else _print(made, all_)
    else:
        refuse(loaded, "makes one GGUF file", {"--max-shard-size": max_shard_size})
        file = _plan_gguf(model, loaded, imatrix, requantize)
        typer.echo(json.dumps(file.json())) if json_ else _print_gguf(file, all_)


def _plan(model: str, recipe: "Recipe", max_shard_size: str) -> "Plan":
    from qtool.checkpoint import Checkpoint
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import resolve
    from qtool.plan import make_plan

    max_shard_bytes = parse_size(max_shard_size)  # before a download that may take hours
    return make_plan(recipe, Checkpoint.open(resolve(model)), max_shard_bytes)


def _plan_gguf(
    model: str, recipe: "GgufRecipe", imatrix: Path | None, requantize: bool
) -> "GgufPlan":
    from qtool.gguf.imatrix import read_importance
    from qtool.gguf.open import open_source
    from qtool.gguf.plan import make_gguf_plan
    from qtool.hub import public_name, resolve

    importance = None if imatrix is None else read_importance(imatrix)
    source = open_source(resolve(model))
    return make_gguf_plan(
        recipe, source, importance, requantize=requantize, origin=public_name(model)
    )


def _print(made: "Plan", every: bool) -> None:
    from qtool.plan_rows import rows, scheme_of

    _table(rows(made.tensors, scheme_of, every), "scheme")
    counts = ", ".join(f"{count} {kind}" for kind, count in made.counts.items())
    files = len(made.layout.files)
    typer.echo(f"recipe {made.recipe.name}, format {made.format}: {counts}")
    typer.echo(
        f"size {made.size_bytes:,} bytes in {files} file{'s' if files > 1 else ''}, "
        f"{made.bits_per_weight:.3f} bits per weight, "
        f"{made.unquantized_share:.1%} of the weights left unquantized"
    )
    _end(made.peak_rss_bytes, made.seconds, made.warnings)


def _print_gguf(made: "GgufPlan", every: bool) -> None:
    from qtool.plan_rows import rows, type_of
    from qtool.summary import not_written

    _table(rows(made.tensors, type_of, every), "type")
    if every:
        for name, reason in made.dropped:
            typer.echo(printable(f"not written: {name} ({reason})"))
    else:
        for line in not_written(made.dropped):
            typer.echo(printable(line))
    counts = ", ".join(f"{count} {kind}" for kind, count in made.counts.items())
    types = ", ".join(f"{count} {name}" for name, count in made.types.items())
    typer.echo(f"recipe {made.recipe.name}, format gguf: {counts}")
    typer.echo(f"types: {types}; {len(made.fallbacks)} of them fallbacks")
    typer.echo(f"size {made.size_bytes:,} bytes, {made.bits_per_weight:.3f} bits per weight")
    _end(made.peak_rss_bytes, made.seconds, made.warnings)


def _table(rows: "Iterable[Row]", stored: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width, and cut names are of no use
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("tensor", "shape", stored):
        table.add_column(title, overflow="fold")
    for title in ("tensors", "bytes"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(printable(row.name), row.shape, row.stored, str(row.count), f"{row.nbytes:,}")
    console.print(table, markup=False)


def _end(peak_rss_bytes: int, seconds: float, warnings: Iterable[str]) -> None:
    typer.echo(
        f"estimated: peak memory {peak_rss_bytes / 2**30:.1f} GiB, "
        f"time {_duration(seconds)} on this machine"
    )
    for warning in warnings:
        said = f"warning: {warning}" if not warning.startswith("note:") else warning
        typer.echo(printable(said))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
