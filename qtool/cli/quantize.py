"""`qtool quantize`: one model, one recipe, one artifact."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.options import (
    Calibration,
    Changes,
    Fresh,
    Imatrix,
    Json,
    MaxShardSize,
    Model,
    OnDevice,
    RecipeName,
    Replace,
    Requantize,
    SampleLength,
    Samples,
    Seed,
    Threads,
)
from qtool.messages.printable import printable


def quantize(
    model: Model,
    recipe: RecipeName,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="to make; by default MODEL-RECIPE or MODEL-RECIPE.gguf"),
    ] = None,
    calibration: Calibration = None,
    samples: Samples = None,
    length: SampleLength = None,
    seed: Seed = None,
    set_: Changes = None,
    stats: Annotated[
        Path | None, typer.Option(help="statistics made by `qtool calibrate`, used unchanged")
    ] = None,
    threads: Threads = None,
    max_ram: Annotated[
        str | None, typer.Option(help="memory that it may take, such as 4GiB; by default any")
    ] = None,
    device: OnDevice = "auto",
    max_shard_size: MaxShardSize = None,
    imatrix: Imatrix = None,
    requantize: Requantize = False,
    fresh: Fresh = False,
    replace: Replace = False,
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
    json_: Json = False,
) -> None:
    """Quantize MODEL as RECIPE says into a folder, or a GGUF file, that engines load."""
    from qtool.api import making
    from qtool.cards.serve import next_lines
    from qtool.messages.progress import Progress

    progress = Progress(quiet=json_, log=log_file)
    summary = making.quantize(
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
    left = [item["name"] for item in summary.dropped]
    for line in [*summary.lines(), *next_lines(Path(summary.artifact), model, modelfile, left)]:
        typer.echo(printable(line))
