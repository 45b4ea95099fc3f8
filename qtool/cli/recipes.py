"""`qtool recipes`: what ships, one of them in full, or the schema that editors use."""

import json
from typing import Annotated

import typer


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="a shipped recipe or a YAML file, to be printed")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON Schema of recipe files")
    ] = False,
) -> None:
    """List the shipped recipes, print one, or print the JSON Schema of their keys."""
    from qtool import recipe

    if schema:
        typer.echo(json.dumps(recipe.schema(), indent=2))
    elif name is not None:
        recipe.load(name)  # a file of the user's own is checked before it is shown
        typer.echo(recipe.find(name).read_text(encoding="utf-8"), nl=False)
    else:
        shipped = recipe.shipped()
        width = max(map(len, shipped), default=0)
        for key, path in shipped.items():
            lines = path.read_text(encoding="utf-8").splitlines()
            typer.echo(f"{key:<{width}}  {lines[0].lstrip('# ')}")
