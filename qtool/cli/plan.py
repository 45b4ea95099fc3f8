"""`qtool plan`: what a recipe will do to a model, before any of it is done."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli import completing
from qtool.cli.options import (
    Calibration,
    Changes,
    Imatrix,
    Json,
    MaxShardSize,
    Model,
    RecipeName,
    Requantize,
    SampleLength,
    Samples,
)
from qtool.messages.printable import printable

if TYPE_CHECKING:
    from qtool.planning.budget import Memory
    from qtool.planning.gguf.planned import GgufPlan
    from qtool.planning.plan import Plan
    from qtool.planning.rows import Row


def plan(
    model: Model,
    recipe: RecipeName,
    set_: Changes = None,
    calibration: Calibration = None,
    samples: Samples = None,
    length: SampleLength = None,
    max_shard_size: MaxShardSize = None,
    imatrix: Imatrix = None,
    requantize: Requantize = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="of the run; by default every core")
    ] = None,
    max_ram: Annotated[
        str | None, typer.Option(help="memory that the run may take, such as 4GiB")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="what will load it: vllm, sglang, transformers, llama.cpp, exllama or mlx-lm",
            autocompletion=completing.engines,
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that the engine shares it between")] = 1,
    all_: Annotated[bool, typer.Option("--all", help="a line for every tensor")] = False,
    json_: Json = False,
) -> None:
    """Say what RECIPE will make of MODEL: each tensor, the size, memory and time.

    With --engine also what that engine would refuse; exit status 1 where it would.
    """
    from qtool.api import looking
    from qtool.recipe.described import methods

    found = looking.plan(
        model,
        recipe,
        calibration=calibration,
        samples=samples,
        length=length,
        changes=set_ or (),
        imatrix=imatrix,
        requantize=requantize,
        threads=threads,
        max_ram=max_ram,
        max_shard_size=max_shard_size,
        engine=engine,
        tp=tp,
    )
    if json_:
        typer.echo(json.dumps(found.json()))
    else:
        how = methods(found.plan.recipe) if found.calibrates else None
        _print_any(found.plan, all_, how)
        for finding in found.findings:
            typer.echo(printable(f"{finding.severity}: {finding.message}"))
        if (name := found.asked.engine) is not None and not found.findings:
            typer.echo(f"note: {name} has nothing to say against it, as far as shapes tell")
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(1)


def _print_any(made: "Plan | GgufPlan", every: bool, how: str | None) -> None:
    """how: by which methods, where these look at activations."""
    from qtool.planning.plan import Plan

    _print(made, every, how) if isinstance(made, Plan) else _print_gguf(made, every, how)


def _print(made: "Plan", every: bool, how: str | None) -> None:
    from qtool.planning.rows import rows, scheme_of

    _table(rows(made.tensors, scheme_of, every), "scheme")
    counts = ", ".join(f"{count} {kind}" for kind, count in made.counts.items())
    files = len(made.layout.files)
    typer.echo(f"recipe {made.recipe.name}, format {made.format}: {counts}")
    if how is not None:
        typer.echo(f"methods: {how}")
    typer.echo(
        f"size {made.size_bytes:,} bytes in {files} file{'s' if files > 1 else ''}, "
        f"{made.bits_per_weight:.3f} bits per weight, "
        f"{made.unquantized_share:.1%} of the weights left unquantized"
    )
    _end(made.memory, made.seconds, made.warnings)


def _print_gguf(made: "GgufPlan", every: bool, how: str | None) -> None:
    from qtool.messages.summary import not_written
    from qtool.planning.rows import rows, type_of

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
    if how is not None:
        typer.echo(f"methods: {how}")
    typer.echo(f"types: {types}; {len(made.fallbacks)} of them fallbacks")
    about = "about " if made.recipe.calibrates else ""  # it will tell of what is yet to be measured
    typer.echo(f"size {about}{made.size_bytes:,} bytes, {made.bits_per_weight:.3f} bits per weight")
    _end(made.memory, made.seconds, made.warnings)


def _table(rows: "Iterable[Row]", stored: str) -> None:
    from qtool.cli.tables import print_table
    from qtool.messages.table import Table

    cells = [(row.name, row.shape, row.stored, str(row.count), f"{row.nbytes:,}") for row in rows]
    print_table(Table(("tensor", "shape", stored, "tensors", "bytes"), cells, 3))


def _end(memory: "Memory", seconds: float, warnings: Iterable[str]) -> None:
    from qtool.messages.remarks import line
    from qtool.messages.sentences import count

    disk = memory.disk_bytes / 1e9
    meanwhile = f"{disk:.1f} GB of disk beside the artifact, " if disk >= 1 else ""
    typer.echo(
        f"estimated: peak memory {_memory(memory.estimated.nbytes)}, {meanwhile}"
        f"time {_duration(seconds)} with {count(memory.setting.threads, 'thread')}"
    )
    if memory.max_ram_bytes is not None:
        typer.echo(memory.line())
    for warning in warnings:
        typer.echo(printable(line(warning)))


def _memory(nbytes: int) -> str:
    """With three digits at least, in the unit that --max-ram is given in."""
    mib = nbytes / 2**20
    if mib >= 10240:
        return f"{mib / 1024:.1f} GiB"
    return f"{mib:.0f} MiB" if mib >= 100 else f"{mib:.3g} MiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
