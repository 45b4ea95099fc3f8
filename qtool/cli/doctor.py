"""`qtool doctor`: what is installed here, what is used of the machine, and what to do about it."""

import json

import typer

from qtool.cli.options import Json
from qtool.messages.printable import printable


def doctor(
    json_: Json = False,
) -> None:
    """Say what is installed, which instructions, GPU and engines there are, and what is missing."""
    from qtool.doctor import examined

    found = examined()
    if json_:
        typer.echo(json.dumps(found.json()))
        return
    rows = found.rows()
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(printable(f"{label:<{width}}  {value}"))
    for line in found.advice:
        typer.echo(printable(f"advice: {line}"))
    if not found.advice:
        typer.echo("nothing to advise")
