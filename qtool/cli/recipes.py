"""`qtool recipes`: what ships, one of them in full, or the schema that editors use."""

import json
from typing import Annotated

import typer

from qtool.cli import completing
from qtool.cli.options import Json


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="a shipped recipe or a YAML file, to be printed",
            autocompletion=completing.recipe_names,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON Schema of recipe files")
    ] = False,
    json_: Json = False,
) -> None:
    """List the shipped recipes, print one, or print the JSON Schema of their keys."""
    from qtool.recipe import listing as recipe_list
    from qtool.recipe import recipe

    if schema:
        typer.echo(json.dumps(recipe.schema(), indent=2))
    elif name is not None:
        loaded = recipe.load(name)  # a file of the user's own is checked before it is shown
        if json_:
            typer.echo(json.dumps({"name": loaded.name, **loaded.effective()}))
        else:
            typer.echo(recipe.find(name).read_text(encoding="utf-8"), nl=False)
    elif json_:
        typer.echo(json.dumps({"recipes": [item.json() for item in recipe_list.listed()]}))
    else:
        groups = list(recipe_list.by_group())
        width = max((len(item.name) for _, items in groups for item in items), default=0)
        for position, (group, items) in enumerate(groups):
            typer.echo(("\n" if position else "") + group)
            for item in items:
                typer.echo(f"  {item.name:<{width}}  {item.about}")
