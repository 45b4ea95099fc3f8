"""`qtool calibrate`: measure a model's activations once, for many recipes."""

import json
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    model: Annotated[str, typer.Argument(help="a folder, a hub id, or an alias such as `tiny`")],
    out: Annotated[Path, typer.Option("-o", "--out", help="file to write, safetensors")],
    recipe: Annotated[
        list[str] | None, typer.Option(help="collect what this recipe needs; may be repeated")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="text or JSONL file, or a hub dataset id")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="calibration samples")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens in a sample")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the choice of samples")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="by default every core")] = None,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Measure the activations of the unquantized MODEL into a file for `quantize --stats`."""
    from qtool.allocator import share_heap

    share_heap()
    from qtool import measure
    from qtool.blockwise import recipe_needs
    from qtool.checkpoint import Checkpoint
    from qtool.errors import SourceError
    from qtool.hub import resolve
    from qtool.native.library import default_threads
    from qtool.progress import Progress
    from qtool.recipe import calibration_sets, common_calibration, load
    from qtool.summary import peak_rss_bytes

    sets = calibration_sets(calibration, samples, length, seed)
    loaded = [load(name, sets) for name in recipe or ()]
    settings = common_calibration(loaded, sets)
    needs = measure.VECTORS.union(*(recipe_needs(one) for one in loaded))
    if out.exists():  # told before a download that may take hours
        raise SourceError(f"{out}: exists; remove it or choose another -o")
    progress = Progress(quiet=json_)
    with progress.stage("download"):
        checkpoint = Checkpoint.open(resolve(model))
    measured = measure.calibrate(
        checkpoint, out, settings, needs, threads or default_threads(), progress
    )
    if json_:
        typer.echo(
            json.dumps(
                {
                    "stats": str(out),
                    "needs": sorted(needs),
                    "sites": measured.sites,
                    "tokens": measured.tokens,
                    "unseen": list(measured.unseen),
                    "seconds": round(progress.total(), 3),
                    "peak_rss_bytes": peak_rss_bytes(),
                    "size_bytes": out.stat().st_size,
                }
            )
        )
        return
    typer.echo(
        f"{out}: {', '.join(sorted(needs))} of {measured.sites} inputs over {measured.tokens} "
        f"tokens, {out.stat().st_size / 1e6:.1f} MB, {progress.total():.1f} s"
    )
    if measured.unseen:
        typer.echo(
            f"no token was routed to {len(measured.unseen)} expert inputs: "
            f"{', '.join(measured.unseen[:3])}{' ...' if len(measured.unseen) > 3 else ''}"
        )
