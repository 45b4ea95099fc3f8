"""`qtool quantize`: one model, one recipe, one artifact."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.printable import printable

if TYPE_CHECKING:
    from qtool.gguf.recipe import GgufRecipe
    from qtool.recipe.recipe import Recipe
    from qtool.runs.progress import Progress
    from qtool.runs.summary import Summary


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
    log_file: Annotated[
        Path | None, typer.Option(help="to append to: a line of JSON for each event")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Quantize MODEL as RECIPE says into a folder, or a GGUF file, that engines load."""
    from qtool.calibrating.allocator import share_heap
    from qtool.formats.safetensors_file import parse_size
    from qtool.native.library import default_threads
    from qtool.recipe.recipe import Recipe, calibration_sets, load
    from qtool.runs.progress import Progress
    from qtool.runs.request import check_device

    share_heap()
    check_device(device)
    fixed = {"calibration": calibration, "samples": samples, "length": length, "seed": seed}
    given = [f"--{name}" for name, value in fixed.items() if value is not None]
    given += [f"--set {item}" for item in set_ or () if item.startswith("calibration.")]
    sets = (set_ or []) + calibration_sets(calibration, samples, length, seed)
    asked = _Asked(
        model, out, stats, imatrix, max_shard_size, requantize, fresh,
        threads or default_threads(), None if max_ram is None else parse_size(max_ram), given,
    )  # fmt: skip
    loaded = load(recipe, sets)
    progress = Progress(quiet=json_, log=log_file)
    with progress.logged("quantize", model=model, recipe=loaded.name):
        # Everything is checked before a download that may take hours.
        if isinstance(loaded, Recipe):
            summary = _to_safetensors(loaded, asked, progress)
        else:
            summary = _to_gguf(loaded, asked, progress)
    if json_:
        typer.echo(json.dumps(summary.json()))
        return
    progress.say_stages()
    for line in summary.lines():
        typer.echo(printable(line))
    from qtool.homes.serve import next_lines

    for line in next_lines(Path(summary.artifact)):
        typer.echo(printable(line))


@dataclass(frozen=True)
class _Asked:
    """The options, as far as both kinds of recipe know them."""

    model: str
    out: Path | None
    stats: Path | None
    imatrix: Path | None
    max_shard_size: str | None
    requantize: bool
    fresh: bool
    threads: int
    max_ram: int | None
    calibration: list[str]  # the options given that are about it


def _to_safetensors(recipe: "Recipe", asked: _Asked, progress: "Progress") -> "Summary":
    from qtool.formats.safetensors_file import parse_size
    from qtool.gguf.open import is_gguf
    from qtool.hub import resolve
    from qtool.runs.pipeline import run
    from qtool.runs.request import Request, artifact_path, check_stats_options
    from qtool.runs.workspace import check_free

    refuse(recipe, "makes no GGUF file", {"--imatrix": asked.imatrix})
    check_stats_options(asked.stats, asked.calibration)
    max_shard_bytes = parse_size(asked.max_shard_size or "5GB")
    target = artifact_path(asked.model, recipe, asked.out)
    check_free(target, is_folder=True)
    with progress.stage("download"):
        source = resolve(asked.model, progress)

    def made_of(folder: Path) -> "Summary":
        request = Request(
            asked.model, folder, recipe, target, asked.stats, asked.threads, max_shard_bytes,
            asked.fresh, asked.max_ram,
        )  # fmt: skip
        return run(request, progress)

    if not is_gguf(source):
        refuse(recipe, f"does not read {source} as GGUF", {"--requantize": asked.requantize})
        return made_of(source)
    from qtool.gguf.convert import checkpoint_folder

    with checkpoint_folder(source, target, progress, requantize=asked.requantize) as folder:
        return made_of(folder)


def _to_gguf(recipe: "GgufRecipe", asked: _Asked, progress: "Progress") -> "Summary":
    from qtool.gguf.quantize import GgufRequest, artifact_path, run_gguf
    from qtool.hub import resolve
    from qtool.runs.workspace import check_free

    refuse(
        recipe,
        "makes a GGUF file, whose importance comes from --imatrix or `importance: true`",
        {"--stats": asked.stats},
    )
    refuse(recipe, "makes one GGUF file", {"--max-shard-size": asked.max_shard_size})
    about_calibration = dict.fromkeys(asked.calibration, True)
    if asked.imatrix is not None:
        refuse(recipe, f"takes importance from {asked.imatrix}", about_calibration)
    elif not recipe.importance:
        refuse(recipe, "measures nothing without `importance: true`", about_calibration)
    check_free(artifact_path(asked.model, recipe, asked.out), is_folder=False)
    with progress.stage("download"):
        source = resolve(asked.model, progress)
    request = GgufRequest(
        asked.model, source, recipe, asked.out, asked.threads, asked.imatrix, asked.requantize,
        asked.fresh, asked.max_ram,
    )  # fmt: skip
    return run_gguf(request, progress)


def refuse(recipe: "Recipe | GgufRecipe", why: str, options: Mapping[str, object]) -> None:
    """UnsupportedError where options are given that change nothing with this recipe."""
    from qtool.errors import UnsupportedError

    given = [name for name, value in options.items() if value]
    if given:
        raise UnsupportedError(
            f"{', '.join(given)} would change nothing: recipe {recipe.name} {why}; leave it out"
        )
