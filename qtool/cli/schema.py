"""`qtool schema`: what the objects that commands print with --json are made of."""

from typing import Annotated

import typer

from qtool.cli import completing


def schema(
    command: Annotated[
        str | None,
        typer.Argument(
            help="such as plan, or inspect-tensor for inspect --tensor",
            autocompletion=completing.schemas,
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of what COMMAND prints with --json, or list the schemas."""
    from qtool import schemas

    if command is None:
        for name in schemas.names():
            typer.echo(name)
    else:
        typer.echo(schemas.text(command), nl=False)
