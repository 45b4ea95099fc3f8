"""`qtool calibrate`: measure a model's activations once, for many recipes."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from qtool.cli import completing
from qtool.cli.options import (
    Calibration,
    Json,
    Model,
    OnDevice,
    Requantize,
    SampleLength,
    Samples,
    Seed,
    Threads,
)
from qtool.messages.printable import printable, size
from qtool.messages.sentences import count


def calibrate(
    model: Model,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="statistics to write, safetensors")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(help="importance matrix to write, as llama-imatrix does (GGUF)")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="collect what this recipe needs; may be repeated",
            autocompletion=completing.recipe_names,
        ),
    ] = None,
    calibration: Calibration = None,
    samples: Samples = None,
    length: SampleLength = None,
    seed: Seed = None,
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="of matmuls: float32; bfloat16, faster on CPUs with AMX"),
    ] = None,
    threads: Threads = None,
    device: OnDevice = "auto",
    requantize: Requantize = False,
    json_: Json = False,
) -> None:
    """Measure the activations of the unquantized MODEL into a file.

    -o serves `quantize --stats`, --imatrix serves GGUF recipes here and in llama.cpp; both may be
    made in one pass.
    """
    if out is None and imatrix is None:
        raise typer.BadParameter(
            "name a file to write: -o STATS for `quantize --stats`, --imatrix OUT.gguf for GGUF"
        )
    from qtool.streaming.allocator import share_heap

    share_heap()
    from qtool.texts.mixture import check_source

    check_source(calibration)  # before imports and a download
    from qtool.blockwise.given import recipe_needs, unserved
    from qtool.checkpoints.gguf_models import is_gguf
    from qtool.converting.source import check_needed
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.messages.summary import peak_rss_bytes
    from qtool.native.library import default_threads
    from qtool.quantizing import calibrate as measure
    from qtool.quantizing.named import check_absent
    from qtool.recipe.gguf import GgufRecipe
    from qtool.recipe.recipe import Recipe, calibration_sets, common_calibration, load
    from qtool.runs.request import device_of
    from qtool.workspaces.replacing import check_not_among

    sets = calibration_sets(calibration, samples, length, seed)
    if precision is not None:
        sets.append(f"calibration.precision={precision}")
    loaded = [load(name, sets) for name in recipe or ()]
    for one in loaded:
        if isinstance(one, GgufRecipe) and (one.sweeps or one.transforms):
            raise typer.BadParameter(
                f"recipe {one.name} measures while it quantizes, each block fed by the last: "
                "nothing that was measured earlier serves it"
            )
        if isinstance(one, GgufRecipe) and imatrix is None:
            raise typer.BadParameter(
                f"recipe {one.name} makes a GGUF file, for which --imatrix OUT.gguf is measured"
            )
        if out is None and isinstance(one, Recipe):
            raise typer.BadParameter(
                f"recipe {one.name} takes statistics: name a file for them with -o STATS"
            )
        if out is not None and isinstance(one, Recipe) and (why := unserved(one)) is not None:
            raise typer.BadParameter(f"{why}: `qtool quantize` measures it by itself")
    settings = common_calibration(loaded, sets)
    needs = frozenset[str]()
    if out is not None:
        needs = measure.VECTORS.union(
            *(recipe_needs(one) for one in loaded if not isinstance(one, GgufRecipe))
        )
    check_absent(out, imatrix)  # told before a download that may take hours
    place = device_of(device)
    progress = Progress(quiet=json_)
    with progress.stage("download"):
        source = resolve(model)
    for made in (out, imatrix):
        if made is not None:
            check_not_among(made, source)
    if not is_gguf(source):
        check_needed(source, requantize)
    with measure.opened(source, imatrix, requantize) as (weights, target):
        measured = measure.calibrate(
            weights, out, settings, needs, threads or default_threads(), progress, target, place
        )
    record = measured.record
    if json_:
        found: dict[str, object] = {}
        if out is not None:
            found |= {"stats": str(out), "size_bytes": out.stat().st_size}
        if imatrix is not None and record is not None:
            found["imatrix"] = {
                **record,
                "file": str(imatrix),
                "size_bytes": imatrix.stat().st_size,
            }
        typer.echo(
            json.dumps(
                found
                | {
                    "needs": sorted(needs),
                    "sites": measured.sites,
                    "tokens": measured.tokens,
                    "unseen": list(measured.unseen),
                    "notes": list(measured.notes),
                    "seconds": round(progress.total(), 3),
                    "peak_rss_bytes": peak_rss_bytes(),
                }
            )
        )
        return
    if out is not None:
        typer.echo(
            f"{out}: {', '.join(sorted(needs))} of {measured.sites} inputs over {measured.tokens} "
            f"tokens, {size(out.stat().st_size)}, {progress.total():.1f} s"
        )
        if measured.unseen:
            typer.echo(
                f"no token was routed to {count(len(measured.unseen), 'input')} of experts: "
                f"{', '.join(measured.unseen[:3])}{' ...' if len(measured.unseen) > 3 else ''}"
            )
    if imatrix is not None and record is not None:
        typer.echo(
            f"{imatrix}: importance of {count(record['entries'], 'tensor')} over "
            f"{measured.tokens} "
            f"tokens, {size(imatrix.stat().st_size)}, {progress.total():.1f} s"
        )
    for note in measured.notes:
        typer.echo(printable(note))
