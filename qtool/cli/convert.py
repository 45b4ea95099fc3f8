"""`qtool convert`: the same numbers in another format."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli import completing
from qtool.cli.options import Json, Replace

if TYPE_CHECKING:
    from qtool.converting.certificate import Converted, Rounded


def convert(
    artifact: Annotated[
        str, typer.Argument(help="a quantized folder or file, a GGUF file, or a hub id")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="awq, awq-gemv, awq-gemv-fast, awq-llm, gptq (v1), gptq-v2, compressed-tensors, "
            "mlx, gguf, gguf-q8_0, or hf: dequantized",
            autocompletion=completing.targets,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="folder or .gguf file to make")],
    lossy: Annotated[
        bool, typer.Option("--lossy", help="round what is not exact, and record the error")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="of dequantized tensors: float16, bfloat16, float32; default: as it was"),
    ] = None,
    assume: Annotated[
        str | None,
        typer.Option(
            help="v1 or v2: how GPTQ's zeros are stored, whatever the config and the zeros say"
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="such as 5GB or 500MB")] = "5GB",
    replace: Replace = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="start over, whatever an interrupted run left"),
    ] = False,
    json_: Json = False,
) -> None:
    """Write ARTIFACT as another format: exactly, and certified, or not at all.

    Dequantized (--to hf), its products are rounded to --dtype, and the error of each is recorded;
    float32 holds them all.
    """
    from qtool.api import making

    made = making.convert(
        artifact,
        to,
        out,
        lossy=lossy,
        dtype=dtype,
        assume=assume,
        max_shard_size=max_shard_size,
        replace=replace,
        fresh=fresh,
        quiet=json_,
    )
    if json_:
        typer.echo(json.dumps(made.json(), allow_nan=False))
    else:
        _print(made)


def _print(made: "Converted") -> None:
    certificate = made.certificate
    alike: dict[tuple[str, str], list[Rounded]] = {}
    for one in certificate.rounded:
        alike.setdefault((one.why, one.what), []).append(one)
    for (why, what), members in alike.items():
        more = f" (and {len(members) - 1} more)" if len(members) > 1 else ""
        worst = max(one.relative_error for one in members)
        typer.echo(f"{members[0].name} {why}{more}: {what}, relative error {worst:.3g} at most")
    layout = f" {certificate.layout}" if certificate.layout else ""
    typer.echo(
        f"{made.artifact}: {made.architecture or 'model'} as {certificate.format}{layout}, "
        f"{made.size_bytes:,} bytes; {certificate.kept}"
    )
