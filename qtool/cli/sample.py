"""`qtool sample`: text that a model writes by itself, to calibrate it on."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.options import Fresh, Json, Model, OnDevice, Threads
from qtool.messages.printable import printable, size
from qtool.messages.sentences import count


def sample(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="JSONL file to write")],
    samples: Annotated[int, typer.Option(min=1, help="that a calibration is to find in it")] = 128,
    length: Annotated[int, typer.Option(min=8, help="tokens in each")] = 512,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="another one gives other texts")
    ] = 0,
    device: OnDevice = "auto",
    threads: Threads = None,
    fresh: Fresh = False,
    json_: Json = False,
) -> None:
    """Generate text with MODEL, for --calibration of `qtool quantize` and others.

    It needs no data, and what comes out is in the languages and of the kinds that the model knows.
    The model is kept in memory as far as half of what is available goes; what does not fit is read
    again for every token.
    """
    from qtool.api import making
    from qtool.messages.progress import Progress
    from qtool.quantizing.advised import calibrated

    found = making.sample(
        model,
        out,
        samples=samples,
        length=length,
        seed=seed,
        device=device,
        threads=threads,
        fresh=fresh,
        progress=Progress(quiet=json_),
    )
    if json_:
        typer.echo(json.dumps(found.json()))
        return
    more = found.texts - found.samples
    why = "since a text that is cut into tokens again may have fewer"
    spare = f" ({more:,} more than asked for, {why})" if more > 0 else ""
    typer.echo(
        printable(
            f"{found.out}: {found.tokens:,} tokens in {count(found.texts, 'text')}{spare}, "
            f"{size(found.size_bytes)}, {found.seconds:.1f} s"
        )
    )
    if (advised := calibrated(model)) is None:
        return
    words = [model, *advised, "--calibration", str(out)]
    words += [] if samples == 128 else ["--samples", str(samples)]
    words += [] if length == 512 else ["--length", str(length)]
    typer.echo(printable(f"next: qtool quantize {shlex.join(words)}"))
