"""`qtool matrix`: many artifacts of one model, and one report."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.options import (
    Calibration,
    Json,
    MaxShardSize,
    OnDevice,
    SampleLength,
    Samples,
    Seed,
    Threads,
)
from qtool.messages.printable import printable
from qtool.messages.sentences import count

if TYPE_CHECKING:
    from qtool.matrix.asked import Matrix


def matrix(
    model: Annotated[
        str, typer.Argument(help="a folder, a GGUF file, a hub id, or an alias such as `tiny`")
    ],
    recipes: Annotated[
        str, typer.Option(help="names or YAML files, such as w4g128-awq,w8-gptq,q4_k_m")
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="folder to make; by default MODEL-matrix")
    ] = None,
    eval_: Annotated[
        Path | None,
        typer.Option(
            "--eval",
            help="text to measure all of them on, against MODEL; as of `qtool eval --text`",
        ),
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="windows of that text; by default up to 20")
    ] = None,
    calibration: Calibration = None,
    samples: Samples = None,
    length: SampleLength = None,
    seed: Seed = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value in place of each recipe's own")
    ] = None,
    error_aware: Annotated[
        bool,
        typer.Option(
            "--error-aware", help="calibrate each recipe by itself, as `quantize` does: slower"
        ),
    ] = False,
    threads: Threads = None,
    device: OnDevice = "auto",
    max_shard_size: MaxShardSize = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="start over what is unfinished; what is finished is kept"),
    ] = False,
    json_: Json = False,
) -> None:
    """Make an artifact of MODEL with each of RECIPES, from one calibration pass, and one report.

    The same command resumes where an earlier one stopped. Exit status 1 where any recipe failed.
    """
    from qtool.streaming.allocator import share_heap

    share_heap()
    from qtool.errors import UsageError
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import plain_name
    from qtool.matrix.asked import Asked
    from qtool.matrix.run import matrix as run
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.recipe.recipe import calibration_sets
    from qtool.runs.request import device_of
    from qtool.texts.source import text_file

    names = tuple(name.strip() for name in recipes.split(",") if name.strip())
    if not names:
        raise UsageError("--recipes names none; give some, such as --recipes w4g128-awq,q4_k_m")
    if windows is not None and eval_ is None:
        raise UsageError("--windows counts windows of a text; give --eval TEXT too")
    folder = out or Path(f"{plain_name(model)}-matrix")
    words = ["qtool", "matrix", model, "--recipes", ",".join(names), "-o", str(folder)]
    options = {
        "--eval": eval_, "--windows": windows, "--calibration": calibration, "--samples": samples,
        "--length": length, "--seed": seed, "--device": device if device == "cuda" else None,
    }  # fmt: skip
    for option, value in options.items():
        words += [option, str(value)] if value is not None else []
    for item in set_ or []:
        words += ["--set", item]
    words += ["--error-aware"] if error_aware else []
    of_calibration = [item for item in set_ or [] if item.strip().startswith("calibration")]
    asked = Asked(
        model,
        names,
        folder,
        (*of_calibration, *calibration_sets(calibration, samples, length, seed)),
        threads or default_threads(),
        parse_size(max_shard_size or "5GB", "--max-shard-size"),
        error_aware,
        None if eval_ is None else text_file(eval_),
        windows,
        shlex.join(words),
        fresh,
        tuple(item for item in set_ or [] if item not in of_calibration),
        device_of(device),
    )
    found = run(asked, Progress(quiet=json_))
    if json_:
        typer.echo(json.dumps(found.json(), allow_nan=False))
    else:
        for line in lines(found):
            typer.echo(printable(line))
    if found.failed:
        raise typer.Exit(1)


def lines(found: "Matrix") -> list[str]:
    """For people: a row for each artifact."""
    titles = ["recipe", "status", "calibrated", "MB", "bits", "KLD", "perplexity", "seconds"]
    rows = [titles]
    for one in found.artifacts:
        rows.append(
            [
                one.recipe,
                one.status,
                one.calibrated,
                _number(None if one.size_bytes is None else one.size_bytes / 1e6, 1),
                _number(one.bits_per_weight, 3),
                _number(one.kld, 4),
                _number(one.perplexity, 2),
                _number(one.seconds, 1),
            ]
        )
    if all(one.perplexity is None for one in found.artifacts):
        rows = [[*row[:5], row[7]] for row in rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    said = [
        "  ".join(
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    said += [f"{one.recipe} failed: {one.error}" for one in found.failed]
    if any(one.calibrated == "shared" for one in found.artifacts):
        said.append(
            "note: what shares a pass is not error-aware; --error-aware calibrates each by itself"
        )
    if found.kept is not None:
        said.append(
            f"note: {found.kept['path']} keeps {found.kept['size_bytes'] / 1e6:,.1f} MB of "
            "statistics for a run that goes on; remove it where none will"
        )
    if found.report is not None:
        said.append(f"report: {found.report}")
    said.append(
        f"{len(found.artifacts) - len(found.failed)} of {count(len(found.artifacts), 'artifact')} "
        "in "
        f"{found.out}, {found.seconds:.1f} s, peak memory {found.peak_rss_bytes / 2**20:.0f} MiB"
    )
    return said


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:z.{digits}f}"
