"""`qtool generate`: a few tokens from an artifact, as a smoke test."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.options import Artifact, Json, OnDevice, Threads
from qtool.messages.sentences import count

if TYPE_CHECKING:
    from qtool.generating.generate import Generated


def generate(
    artifact: Artifact,
    prompt: Annotated[str, typer.Option(help="what the text begins with")] = "The capital of",
    tokens: Annotated[int, typer.Option(min=1, help="how many to add, at most")] = 32,
    device: OnDevice = "auto",
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Continue a text with ARTIFACT by greedy decoding: a smoke test.

    On the CPU matrices are dequantized once, and kept in up to half of the memory that is
    available; what does not fit is dequantized for each matmul. With --device cuda the model stays
    there as it is stored, and single tokens are multiplied by packed 4-bit words (GEMV). To serve a
    model, use an engine.
    """
    from qtool.api import looking
    from qtool.messages.progress import Progress

    found = looking.generate(
        artifact,
        prompt,
        tokens=tokens,
        device=device,
        threads=threads,
        progress=Progress(quiet=json_),
    )
    if json_:
        typer.echo(json.dumps(found.json(), allow_nan=False))
        return
    typer.echo(found.prompt + found.text)
    typer.echo("")
    for line in lines(found):
        typer.echo(line)


def lines(found: "Generated") -> list[str]:
    """For people, after the text."""
    rate = found.tokens_per_second
    speed = "" if rate is None else f", {rate:.2f} tokens/s"
    end = ", ended by itself" if found.ended else ""
    said = [
        f"{count(found.prompt_tokens, 'token')} of prompt in {found.seconds_prompt:.1f} s, "
        f"{len(found.tokens)} generated{speed}{end}, on {found.device}"
    ]
    if found.device != "cpu":
        said.append(
            f"{found.fused} of {count(found.matrices, 'matrix')} multiplied as packed words"
        )
    elif found.not_kept:
        said.append(
            f"{found.not_kept} of {found.matrices} matrices were dequantized for each matmul: "
            "half of the memory that is available keeps no more"
        )
    return said
