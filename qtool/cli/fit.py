"""`qtool fit`: a recipe whose types make the best artifact of a given size."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli import completing
from qtool.cli.options import (
    Calibration,
    Changes,
    Fresh,
    Json,
    Model,
    OnDevice,
    Requantize,
    SampleLength,
    Seed,
    Threads,
)
from qtool.messages.printable import printable


def fit(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="recipe to write, a YAML file")],
    recipe: Annotated[
        str,
        typer.Option(
            help="what to begin with: a shipped recipe's name, or a YAML file",
            autocompletion=completing.recipe_names,
        ),
    ] = "q4_k_m-awq-gptq",
    size: Annotated[
        str | None, typer.Option(help="of what the recipe makes, such as 4.2GB")
    ] = None,
    bits: Annotated[
        float | None, typer.Option(min=0.1, max=32, help="bits a weight, instead of --size")
    ] = None,
    types: Annotated[
        str | None,
        typer.Option(help="to choose among: such as q3_k,q4_k,q6_k, or bits, such as 4,8"),
    ] = None,
    calibration: Calibration = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="samples of the text; 16 by default")
    ] = None,
    length: SampleLength = None,
    seed: Seed = None,
    set_: Changes = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="a file: what was measured is kept there, and taken from it again"),
    ] = None,
    threads: Threads = None,
    max_ram: Annotated[
        str | None, typer.Option(help="memory that it may take, such as 2GiB; by default any")
    ] = None,
    device: OnDevice = "auto",
    requantize: Requantize = False,
    fresh: Fresh = False,
    json_: Json = False,
) -> None:
    """Choose types, or bits, matrix by matrix: the best of a given size.

    What an error in each matrix costs the whole network is measured once, by a forward and a
    backward pass; the recipe that comes out is for `qtool quantize`:

    qtool fit tiny --size 2MB -o mine.yaml
    """
    from qtool.streaming.allocator import share_heap
    from qtool.texts.mixture import check_source

    check_source(calibration)  # before imports and a download
    from qtool.fitting.request import fit_request
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads

    share_heap()
    progress = Progress(quiet=json_)
    text = {"calibration": calibration, "samples": samples, "length": length, "seed": seed}
    request = fit_request(
        model, recipe, out, size=size, bits=bits, types=types, text=text, sets=set_ or [],
        costs=costs, threads=threads or default_threads(), max_ram=max_ram, fresh=fresh,
        requantize=requantize, progress=progress, device=device,
    )  # fmt: skip
    from qtool.fitting.fit import fit as run  # torch: what can be told before is

    found = run(request, progress)
    if json_:
        typer.echo(json.dumps(found.json()))
        return
    words = ["qtool", "quantize", model, "--recipe", str(out)]
    words += ["--requantize"] if requantize else []
    if request.recipe.calibrates:
        words += [f"--{key}={value}" for key, value in text.items() if value is not None]
    for line in found.lines(words):
        typer.echo(printable(line))
