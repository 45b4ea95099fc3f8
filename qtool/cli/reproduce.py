"""`qtool reproduce`: an artifact made again from what it records, and compared."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qtool.cli.options import Json, Threads
from qtool.messages.printable import printable

if TYPE_CHECKING:
    from qtool.reproduce.run import Reproduced

_SHOWN = 5


def reproduce(
    artifact: Annotated[
        Path, typer.Argument(help="a folder or a .gguf file that qtool quantize made")
    ],
    model: Annotated[
        str | None, typer.Option(help="the source, where the artifact names none: a folder, an id")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="the calibration text, where it was a file")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(help="the importance matrix, where another program made it")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="folder to make it in; by default that for temporary files"),
    ] = None,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Make ARTIFACT again from its own record and compare; exit status 1 where it differs.

    Bytes are compared; on another kind of CPU than a calibrated one was made on, codes.
    """
    from qtool.streaming.allocator import share_heap

    share_heap()
    from qtool.errors import SourceError
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.reproduce.run import Asked
    from qtool.reproduce.run import reproduce as run

    if not artifact.exists():
        raise SourceError(
            f"{artifact}: no such file or folder; what is made again is an artifact, by its path"
        )
    asked = Asked(artifact, model, calibration, imatrix, work, threads or default_threads())
    found = run(asked, Progress(quiet=json_))
    if json_:
        typer.echo(json.dumps(found.json(), allow_nan=False))
    else:
        for line in lines(found):
            typer.echo(printable(line))
    if not found.same:
        raise typer.Exit(1)


def lines(found: "Reproduced") -> list[str]:
    """For people."""
    said = []
    if not found.alike:
        known = found.recorded or {}
        others = [
            f"{key} {known.get(key, 'none')} there, {found.here.get(key, 'none')} here"
            for key in sorted(known.keys() | found.here.keys())
            if known.get(key) != found.here.get(key)
        ]
        said.append(f"another environment ({'; '.join(others)}): codes are compared, not bytes")
    for row in found.tensors[:_SHOWN]:
        said.append(f"differs: {row['name']}, {_what(row)}")
    if len(found.tensors) > _SHOWN:
        said.append(f"differ: {len(found.tensors) - _SHOWN} more tensors")
    if found.alike and found.differing_files:
        said.append(f"files that differ: {', '.join(found.differing_files[:_SHOWN])}")
    what = f"{len(found.files)} file{'s' if len(found.files) > 1 else ''}"
    if found.same and found.alike:
        verdict = f"reproduced: {what}, the same to the byte"
    elif found.same:
        verdict = "reproduced: every code is the same"
    elif found.tensors:
        count = len(found.tensors)
        verdict = f"not reproduced: {count} tensor{'s differ' if count > 1 else ' differs'}"
    else:
        verdict = "not reproduced: every tensor is the same, but not what lies beside them"
    said.append(
        f"{found.artifact}: {verdict} (recipe {found.recipe}, {found.source}, "
        f"{found.seconds:.1f} s)"
    )
    return said


def _what(row: Mapping[str, Any]) -> str:
    """How many of a tensor's codes differ; what does, where that is none."""
    if row["differing"]:
        return f"{row['differing']:,} {row['of']}"
    if row["of"] == "codes":
        return "its scales; every code is the same"
    return f"how it is stored; all its {row['of']} are the same"
