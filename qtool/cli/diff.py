"""`qtool diff`: how two artifacts differ."""

import json
from typing import Annotated

import typer

from qtool.cli.options import Json


def diff(
    a: Annotated[str, typer.Argument(help="a folder, a safetensors or a GGUF file, or a hub id")],
    b: Annotated[str, typer.Argument(help="the one to compare it with, of any format")],
    all_: Annotated[bool, typer.Option("--all", help="a row for every difference")] = False,
    fail_if_different: Annotated[
        bool, typer.Option("--fail-if-different", help="exit with 1 where anything differs")
    ] = False,
    json_: Json = False,
) -> None:
    """Say how A and B differ: metadata, tensors that one lacks, storage, and the numbers."""
    from qtool.cli.inspect import show
    from qtool.diff.diff import diff as run
    from qtool.diff.sides import told_as
    from qtool.diff.text import left_out, summary, tables
    from qtool.hub import resolve
    from qtool.messages.progress import Progress

    paths = []
    for label, name in (("A", a), ("B", b)):
        with told_as(label):
            paths.append(resolve(name))
    first, second = paths
    found = run(first, second, Progress(quiet=json_))
    if json_:
        typer.echo(json.dumps(found.json(), allow_nan=False))
    else:
        show(summary(found), tables(found, all_))
        for line in () if all_ else left_out(found):
            typer.echo(line)
    if fail_if_different and found.different:
        raise typer.Exit(1)
