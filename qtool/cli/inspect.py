"""`qtool inspect`: what an artifact is, without loading it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qtool.cli.options import Json
from qtool.errors import SourceError, UnsupportedError
from qtool.messages.printable import print_json, sayable

if TYPE_CHECKING:
    from qtool.gguf.inspect import GgufInspection
    from qtool.messages.table import Table

_TITLES = ("tensor", "shape", "dtype", "scheme", "bits/weight", "bytes")
_MODELS = ("model", "architecture", "file type", "parameters", "bits/weight", "bytes")


def inspect(
    artifact: Annotated[
        str,
        typer.Argument(
            help="a checkpoint folder, a safetensors or a GGUF file, hf://OWNER/NAME[/FILE] or "
            "http(s)://..., of which headers alone are fetched"
        ),
    ],
    tensor: Annotated[
        str | None,
        typer.Option(help="name of one to read: its range, mean, and histogram of codes"),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="a row for every tensor")] = False,
    json_: Json = False,
) -> None:
    """Say what ARTIFACT is: format, scheme, bits per weight, tensors, provenance."""
    from qtool.checkpoints.gguf_models import gguf_models
    from qtool.hub import local

    path = local(artifact) or Path(artifact)
    if not path.exists() and (address := _address(artifact)) is not None:
        try:
            _inspect_remote(address, tensor, all_, json_)
        except SourceError as error:
            if address == artifact:
                raise
            raise SourceError(f"{artifact}: no such file or folder here, and {error}") from None
        return
    if models := gguf_models(path):
        _inspect_gguf(path, models, tensor, all_, json_)
        return
    from qtool.artifacts.artifact import Artifact
    from qtool.inspecting.inspect import inspect as look
    from qtool.inspecting.tensor_detail import detail_lines, tensor_detail
    from qtool.messages.table import Table

    if tensor is not None:
        detail = tensor_detail(Artifact.open(path), tensor)
        _say_detail(detail, json_, detail_lines)
        return
    found = look(path)
    if json_:
        print_json(found.json())
    else:
        show(found.summary(), [Table(_TITLES, list(found.rows(all_)), 4)])


def _address(text: str) -> str | None:
    """Where a model lies on a server: an address, or what a hub id or an alias means."""
    from qtool import hub

    scheme, mark, _ = text.partition("://")
    if mark and scheme.isalnum() and scheme.lower() not in ("hf", "http", "https"):
        raise SourceError(
            f"{text}: nothing is fetched from {scheme}:// addresses; expected hf://, http:// or "
            "https://, or a file or folder here"
        )
    if text.lower().startswith(("hf://", "http://", "https://")):
        return text
    model = hub.parse(text)
    return None if model is None else f"hf://{model}"


def _inspect_remote(address: str, tensor: str | None, every: bool, as_json: bool) -> None:
    from qtool.gguf.inspect_text import summary, tables
    from qtool.inspecting.inspect import Inspection
    from qtool.messages.table import Table
    from qtool.remote.open import opened

    if tensor is not None:
        raise UnsupportedError(
            f"--tensor reads weights, and of {address} only headers are fetched; download it first"
        )
    with opened(address) as (found, received):
        if as_json:
            print_json(found.json())
            return
        fetched = ("fetched", f"{received():,} bytes")
        if isinstance(found, Inspection):
            table = Table(_TITLES, list(found.rows(every)), 4)
            show([*found.summary(), fetched], [table])
        else:
            show([*summary(found), fetched], tables(found, every))


def _inspect_gguf(
    artifact: Path, models: list[Path], tensor: str | None, every: bool, as_json: bool
) -> None:
    from qtool.gguf.inspect import tensor_detail
    from qtool.gguf.inspect_text import detail_lines, summary, tables

    if len(models) > 1:
        if tensor is not None:
            raise SourceError(f"{artifact}: holds {len(models)} GGUF models; name one of them")
        _list_models(models, as_json)
        return
    with _opened(models[0]) as found:
        if tensor is not None:
            _say_detail(tensor_detail(found.file, tensor), as_json, detail_lines)
        elif as_json:
            print_json(found.json())
        else:
            show(summary(found), tables(found, every))


@contextmanager
def _opened(path: Path) -> Iterator["GgufInspection"]:
    from qtool.formats.gguf_file import GgufFile
    from qtool.gguf.inspect import GgufInspection

    with GgufFile.open(path) as file:
        yield GgufInspection(file)


def _list_models(models: list[Path], as_json: bool) -> None:
    """A folder of several: a line for each."""
    from qtool.messages.table import Table

    rows = []
    found = []
    for path in models:
        with _opened(path) as one:
            found.append(one.json() | {"tensors": len(one.file.tensors)})
        row = found[-1]
        rows.append(
            (
                path.name,
                row["architecture"] or row["kind"],
                row["file_type"] or "-",
                f"{row['parameters']:,}",
                f"{row['bits_per_weight']:.3f}",
                f"{row['size_bytes']:,}",
            )
        )
    if as_json:
        print_json({"format": "gguf", "models": found})
    else:
        show([], [Table(_MODELS, rows, 3)])


def _say_detail(detail: dict[str, Any], as_json: bool, lines: Any) -> None:
    if as_json:
        print_json(sayable(detail))
        return
    from qtool.inspecting.histogram import bars

    for line in lines(detail):
        typer.echo(line)
    terminal = sys.stdout.isatty()
    for one in bars(detail):
        title, *rows = one.lines(blocks=terminal)
        typer.echo(typer.style(title, bold=True) if terminal else title)
        for row in rows:
            typer.echo(row)


def show(summary: list[tuple[str, str]], tables: list["Table"]) -> None:
    if sys.stdout.isatty():
        _print_rich(summary, tables)
    else:
        _print_plain(summary, tables)


def _print_plain(summary: list[tuple[str, str]], tables: list["Table"]) -> None:
    """Columns of spaces, for pipes; needs no imports."""
    for label, value in summary:
        typer.echo(f"{label}: {value}")
    for number, one in enumerate(tables):
        if number:
            typer.echo()
        rows = [one.titles, *one.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(one.titles))]
        for row in rows:
            cells = [
                cell.ljust(width) if column < one.texts else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            typer.echo("  ".join(cells).rstrip())


def _print_rich(summary: list[tuple[str, str]], tables: list["Table"]) -> None:
    from rich import table
    from rich.text import Text

    from qtool.cli.tables import console, print_table

    where = console()
    head = table.Table(box=None, show_header=False, pad_edge=False)
    head.add_column()
    head.add_column(overflow="fold")
    for label, value in summary:
        head.add_row(Text(label, style="bold"), Text(value))
    if summary:
        where.print(head)
    for one in tables:
        print_table(one, where)
