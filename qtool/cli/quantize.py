"""`qtool quantize`: one model, one recipe, one artifact."""

import json
from pathlib import Path
from typing import Annotated

import typer


def quantize(
    model: Annotated[str, typer.Argument(help="a folder, a hub id, or an alias such as `tiny`")],
    recipe: Annotated[str, typer.Option(help="a shipped recipe's name, or a YAML file")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="folder to make; by default MODEL-RECIPE")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="text or JSONL file, or a hub dataset id")
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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="such as 5GB or 500MB")] = "5GB",
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Quantize MODEL as RECIPE says into a folder that engines load."""
    from qtool.allocator import share_heap
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import resolve
    from qtool.native.library import default_threads
    from qtool.pipeline import check_device, check_stats_options, run
    from qtool.progress import Progress
    from qtool.recipe import calibration_sets, load
    from qtool.request import Request, artifact_path
    from qtool.staging import check_out

    share_heap()
    check_device(device)
    fixed = {"calibration": calibration, "samples": samples, "length": length, "seed": seed}
    given = [f"--{name}" for name, value in fixed.items() if value is not None]
    given += [f"--set {item}" for item in set_ or () if item.startswith("calibration.")]
    check_stats_options(stats, given)
    sets = (set_ or []) + calibration_sets(calibration, samples, length, seed)
    progress = Progress(quiet=json_)
    loaded = load(recipe, sets)
    # Before a download that may take hours.
    max_shard_bytes = parse_size(max_shard_size)
    check_out(artifact_path(model, loaded, out))
    with progress.stage("download"):
        source = resolve(model)
    request = Request(
        model=model,
        source=source,
        recipe=loaded,
        out=out,
        stats=stats,
        threads=threads or default_threads(),
        max_shard_bytes=max_shard_bytes,
    )
    summary = run(request, progress)
    if json_:
        typer.echo(json.dumps(summary.json()))
        return
    progress.say_stages()
    for line in summary.lines():
        typer.echo(line)
