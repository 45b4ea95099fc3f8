"""`qtool eval`: perplexity of an artifact, and how far it is from the unquantized model."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qtool.cli.options import (
    Against,
    Artifact,
    Json,
    KeptReference,
    MeasuredText,
    OnDevice,
    Protocol,
    Threads,
    WindowLength,
    Windows,
)
from qtool.messages.sentences import count

if TYPE_CHECKING:
    from qtool.quality.evaluate import Evaluation


def evaluate(
    artifact: Artifact,
    text: MeasuredText,
    against: Against = None,
    windows: Windows = None,
    length: WindowLength = 512,
    protocol: Protocol = "plain",
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", help="exit with 1 where it holds, such as 'kld>0.05'"),
    ] = None,
    threads: Threads = None,
    cache: KeptReference = True,
    device: OnDevice = "auto",
    json_: Json = False,
) -> None:
    """Measure ARTIFACT on a text: perplexity, and with --against KL divergence and agreement."""
    from qtool.streaming.allocator import share_heap

    share_heap()
    from qtool.api import looking
    from qtool.messages.progress import Progress
    from qtool.quality.conditions import check_figure, parse_condition

    conditions = [parse_condition(condition) for condition in fail_if or ()]
    for condition in conditions:
        check_figure(condition, reference=against is not None)
    found = looking.evaluate(
        artifact,
        text,
        against=against,
        windows=windows,
        length=length,
        protocol=protocol,
        threads=threads,
        cache=cache,
        device=device,
        progress=Progress(quiet=json_),
    )
    failed = [said for one in conditions if (said := one.holds(found.found)) is not None]
    if json_:
        typer.echo(json.dumps(found.json() | {"failed": failed}, allow_nan=False))
    else:
        for line in lines(found):
            typer.echo(line)
    for said in failed:
        print(f"failed: {said}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def lines(found: "Evaluation") -> list[str]:
    """For people."""
    row: Any = found.found
    said = [
        f"{found.artifact}: {found.size_bytes:,} bytes",
        f"perplexity {row['perplexity']:.4f} ({_interval(row['perplexity_interval'], 4)})",
    ]
    if "kld" in row:
        kld, drafts = row["kld"], row["tokens_per_pass"]
        said[1] += f", reference {row['reference_perplexity']:.4f}"
        said += [
            f"KL divergence {kld['mean']:z.5f} ({_interval(kld['interval'], 5)}), median "
            f"{kld['median']:z.5f}, p99 {kld['p99']:z.4f}, max {kld['max']:z.4f}",
            f"same top token {row['top1_agreement']:.2%}, RMS change of the next token's "
            f"probability {row['rms_dp']:.4f}",
            f"as a draft of the reference: {row['acceptance']:.1%} accepted, "
            + ", ".join(f"{v:.2f} tokens a pass with {k}" for k, v in drafts.items()),
            "expected speed-up, if decoding takes as long as its weights are large: "
            + ", ".join(f"{v:.2f} with {k}" for k, v in row["speed_up"].items()),
        ]
    protocol = row["protocol"]
    said.append(
        f"{row['tokens']} positions: {count(protocol['windows'], 'window')} of "
        f"{protocol['length']} of {protocol['text']}, protocol {protocol['name']}"
    )
    rounded = {"inputs of linear layers": protocol["activations"], "KV cache": protocol["kv_cache"]}
    simulated = [f"{what} {how}" for what, how in rounded.items() if how != "float32"]
    if simulated:
        said.append("rounded as engines do: " + ", ".join(simulated))
    said += [f"not simulated: {what}" for what in protocol["not_simulated"]]
    return said


def _interval(bounds: list[float] | None, digits: int) -> str:
    if bounds is None:
        return "one window does not tell how certain that is"
    return f"95 %: {bounds[0]:z.{digits}f} to {bounds[1]:z.{digits}f}"
