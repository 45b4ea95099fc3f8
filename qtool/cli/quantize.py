"""`qtool quantize`: one model, one recipe, one artifact."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.printable import printable

if TYPE_CHECKING:
    from qtool.gguf.recipe import GgufRecipe
    from qtool.recipe import Recipe


def quantize(
    model: Annotated[
        str, typer.Argument(help="a folder, a GGUF file, a hub id, or an alias such as `tiny`")
    ],
    recipe: Annotated[str, typer.Option(help="a shipped recipe's name, or a YAML file")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="to make; by default MODEL-RECIPE or MODEL-RECIPE.gguf"),
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
    max_ram: Annotated[
        str | None, typer.Option(help="memory that it may take, such as 4GiB; by default any")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
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
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Quantize MODEL as RECIPE says into a folder, or a GGUF file, that engines load."""
    from qtool.allocator import share_heap
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import resolve
    from qtool.native.library import default_threads
    from qtool.progress import Progress
    from qtool.recipe import Recipe, calibration_sets, load
    from qtool.request import check_device

    share_heap()
    check_device(device)
    fixed = {"calibration": calibration, "samples": samples, "length": length, "seed": seed}
    given = [f"--{name}" for name, value in fixed.items() if value is not None]
    given += [f"--set {item}" for item in set_ or () if item.startswith("calibration.")]
    sets = (set_ or []) + calibration_sets(calibration, samples, length, seed)
    progress = Progress(quiet=json_)
    loaded = load(recipe, sets)
    count = threads or default_threads()
    ram = None if max_ram is None else parse_size(max_ram)
    # Everything is checked before a download that may take hours.
    if isinstance(loaded, Recipe):
        from qtool.gguf.open import is_gguf
        from qtool.pipeline import run
        from qtool.request import Request, artifact_path, check_stats_options
        from qtool.workspace import check_free

        refuse(loaded, "makes no GGUF file", {"--imatrix": imatrix})
        check_stats_options(stats, given)
        max_shard_bytes = parse_size(max_shard_size or "5GB")
        target = artifact_path(model, loaded, out)
        check_free(target, is_folder=True)
        with progress.stage("download"):
            source = resolve(model)
        if not is_gguf(source):
            refuse(loaded, f"does not read {source} as GGUF", {"--requantize": requantize})
            request = Request(model, source, loaded, out, stats, count, max_shard_bytes, fresh, ram)
            summary = run(request, progress)
        else:
            from qtool.gguf.convert import checkpoint_folder

            with checkpoint_folder(source, target, progress, requantize=requantize) as folder:
                request = Request(
                    model, folder, loaded, target, stats, count, max_shard_bytes, fresh, ram
                )
                summary = run(request, progress)
    else:
        from qtool.gguf.quantize import GgufRequest, run_gguf
        from qtool.gguf.quantize import artifact_path as gguf_path
        from qtool.workspace import check_free

        refuse(
            loaded,
            "makes a GGUF file, whose importance comes from --imatrix or `importance: true`",
            {"--stats": stats},
        )
        refuse(loaded, "makes one GGUF file", {"--max-shard-size": max_shard_size})
        if imatrix is not None:
            refuse(loaded, f"takes importance from {imatrix}", dict.fromkeys(given, True))
        elif not loaded.importance:
            refuse(
                loaded, "measures nothing without `importance: true`", dict.fromkeys(given, True)
            )
        check_free(gguf_path(model, loaded, out), is_folder=False)
        with progress.stage("download"):
            source = resolve(model)
        summary = run_gguf(
            GgufRequest(model, source, loaded, out, count, imatrix, requantize, fresh, ram),
            progress,
        )
    if json_:
        typer.echo(json.dumps(summary.json()))
        return
    progress.say_stages()
    for line in summary.lines():
        typer.echo(printable(line))


def refuse(recipe: "Recipe | GgufRecipe", why: str, options: Mapping[str, object]) -> None:
    """UnsupportedError where options are given that change nothing with this recipe."""
    from qtool.errors import UnsupportedError

    given = [name for name, value in options.items() if value]
    if given:
        raise UnsupportedError(
            f"{', '.join(given)} would change nothing: recipe {recipe.name} {why}; leave it out"
        )
