"""`qtool download`: a model from the hub into its cache, resumed and compared with its digests."""

import json
from typing import Annotated

import typer

from qtool.cli import completing
from qtool.cli.options import Json
from qtool.messages.printable import printable
from qtool.messages.sentences import count, verb


def download(
    model: Annotated[
        str,
        typer.Argument(
            help="OWNER/NAME[@REVISION], OWNER/NAME:QUANT for GGUF, or an alias",
            autocompletion=completing.models,
        ),
    ],
    include: Annotated[
        list[str] | None,
        typer.Option(help="these files instead of those that quantizing needs, such as '*.gguf'"),
    ] = None,
    json_: Json = False,
) -> None:
    """Download what quantizing MODEL needs, and say where it lies.

    It goes into huggingface_hub's cache (HF_HOME), from HF_ENDPOINT, with the token of `hf auth
    login` or HF_TOKEN. What was interrupted is resumed; every file is compared with
    the digest that the hub states.
    """
    from qtool.hub.asked import asked
    from qtool.messages.progress import Progress

    progress = Progress(quiet=json_)
    found = asked(model, include or (), progress)
    seconds = round(progress.total(), 3)
    if json_:
        typer.echo(json.dumps({"model": model, **found.json(), "seconds": seconds}))
        return
    size = sum(file.size or 0 for file in found.files)
    if found.model is None:
        files = count(len(found.files), "file")
        typer.echo(f"{model} ships with qtool ({files}, {size / 1e6:,.1f} MB): nothing to download")
        typer.echo(printable(str(found.folder)))
        return
    received = sum(found.received.values())
    digests = verb(found.checked, "their digests", "its digest")
    compared = f", {count(found.checked, 'file')} of the cache compared with {digests}"
    typer.echo(
        printable(
            f"{found.model.repository} at {found.commit}: {count(len(found.files), 'file')}, "
            f"{size / 1e6:,.1f} MB; {received / 1e6:,.1f} MB fetched"
            f"{' and compared with the digests' if received else ''}"
            f"{compared if found.checked else ''}"
        )
    )
    typer.echo(printable(str(found.named or found.folder)))
