"""`qtool push`: an artifact into a repository of the hub, with its card."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.options import Json, Threads
from qtool.messages.printable import printable
from qtool.messages.sentences import count


def push(
    artifact: Annotated[Path, typer.Argument(help="a folder, or a .gguf file")],
    repository: Annotated[str, typer.Argument(help="OWNER/NAME; made where it is not there yet")],
    private: Annotated[
        bool, typer.Option("--private", help="make it so that only its owner sees it")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="remove files of another model that lie there"),
    ] = False,
    revision: Annotated[str, typer.Option(help="a branch; made where it is not there")] = "main",
    message: Annotated[str | None, typer.Option(help="what the commit is called")] = None,
    eval_: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval",
            help="what `qtool eval --json` printed, for the card's table; by default eval.json in "
            "ARTIFACT or ARTIFACT.eval.json",
        ),
    ] = None,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Check ARTIFACT as `qtool verify` does, and send it to REPOSITORY as one commit."""
    from qtool.messages.progress import Progress
    from qtool.publishing.push import push as run

    progress = Progress(quiet=json_)
    made = run(
        artifact,
        repository,
        private=private,
        replacing=replace,
        revision=revision,
        message=message,
        evaluations=eval_ or (),
        threads=threads,
        progress=progress,
    )
    if json_:
        typer.echo(json.dumps({**made.json(), "seconds": round(progress.total(), 3)}))
        return
    size = sum(nbytes for _, nbytes in made.files)
    typer.echo(
        printable(
            f"{made.url}: {count(len(made.files), 'file')}, {size / 1e6:,.1f} MB, commit "
            f"{made.commit}"
        )
    )
    from qtool.cards.serve import of_pushed

    for line in of_pushed(artifact, repository):
        typer.echo(printable(line))
