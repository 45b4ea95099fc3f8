"""`qtool quantize`: one model, one recipe, one artifact."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli import completing
from qtool.printable import printable


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="a folder, a GGUF file, a hub id, or an alias such as `tiny`",
            autocompletion=completing.models,
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            help="a shipped recipe's name, or a YAML file",
            autocompletion=completing.recipe_names,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="to make; by default MODEL-RECIPE or MODEL-RECIPE.gguf"),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="text, JSON or Parquet (texts, chats), CSV, YAML of several, hub dataset"
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="calibration samples")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens in a sample")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the choice of samples")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value put over the recipe's own")
    ] = None,
    stats: Annotated[
        Path | None, typer.Option(help="statistics made by `qtool calibrate`, used unchanged")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="by default every core")] = None,
    max_ram: Annotated[
        str | None, typer.Option(help="memory that it may take, such as 4GiB; by default any")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto, which is the CPU")] = "auto",
    max_shard_size: Annotated[
        str | None, typer.Option(help="such as 500MB; by default 5GB")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(help="importance matrix for GGUF, of qtool or llama-imatrix")
    ] = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="take a GGUF file that is quantized already")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="start over, whatever an interrupted run left")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="take an earlier artifact's place, when whole")
    ] = False,
    modelfile: Annotated[
        bool, typer.Option("--modelfile", help="write FILE.Modelfile, for Ollama, beside the GGUF")
    ] = False,
    provenance: Annotated[
        bool,
        typer.Option("--provenance", help="write OUT.provenance.json: digests, inputs, times"),
    ] = False,
    log_file: Annotated[
        Path | None, typer.Option(help="to append to: a line of JSON for each event")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Quantize MODEL as RECIPE says into a folder, or a GGUF file, that engines load."""
    from qtool import api
    from qtool.homes.serve import next_lines
    from qtool.runs.progress import Progress

    progress = Progress(quiet=json_, log=log_file)
    summary = api.quantize(
        model,
        recipe,
        out,
        calibration=calibration,
        samples=samples,
        length=length,
        seed=seed,
        changes=set_ or (),
        stats=stats,
        threads=threads,
        max_ram=max_ram,
        max_shard_size=max_shard_size,
        imatrix=imatrix,
        requantize=requantize,
        fresh=fresh,
        modelfile=modelfile,
        provenance=provenance,
        device=device,
        replace=replace,
        progress=progress,
    )
    if json_:
        typer.echo(json.dumps(summary.json()))
        return
    progress.say_stages()
    for line in [*summary.lines(), *next_lines(Path(summary.artifact), model, modelfile)]:
        typer.echo(printable(line))
