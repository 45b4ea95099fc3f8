"""`qtool convert`: the same numbers in another format."""

import json
from pathlib import Path
from typing import Annotated

import typer

FORMATS = ("hf",)


def convert(
    artifact: Annotated[Path, typer.Argument(help="a GGUF file, or the first part of one")],
    to: Annotated[str, typer.Option("--to", help="hf: a Hugging Face checkpoint")],
    out: Annotated[Path, typer.Option("-o", "--out", help="folder to make")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float16, bfloat16 or float32; by default as the file has it"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="such as 5GB or 500MB")] = "5GB",
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Write ARTIFACT as another format, exactly where the format allows."""
    from qtool.errors import UsageError
    from qtool.formats.gguf_file import GgufFile
    from qtool.formats.safetensors_file import parse_size
    from qtool.gguf.convert import convert_to_hf
    from qtool.gguf.from_gguf import gguf_source
    from qtool.gguf.to_hf import DTYPES
    from qtool.progress import Progress
    from qtool.staging import check_out

    if to not in FORMATS:
        raise UsageError(f"--to {to}: expected {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")
    max_shard_bytes = parse_size(max_shard_size)
    check_out(out)
    progress = Progress(quiet=json_)
    with GgufFile.open(artifact) as file:
        made = convert_to_hf(gguf_source(file), out, dtype, max_shard_bytes, progress)
    if json_:
        typer.echo(json.dumps(made.json()))
        return
    for warning in made.warnings:
        typer.echo(f"warning: {warning}")
    exact = "every number as it was"
    if made.dequantized:
        kinds = ", ".join(f"{count} {kind}" for kind, count in made.dequantized.items())
        exact = f"dequantized and rounded to {made.dtype}: {kinds} tensors"
    typer.echo(
        f"{made.artifact}: {made.architecture}, {made.tensors} tensors, {made.size_bytes:,} bytes; "
        f"{exact}"
    )
