"""`qtool verify`: whether an artifact is whole and sane, and how far it is from its source."""

from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli import completing
from qtool.cli.options import Against, Json, Threads
from qtool.messages.printable import print_json
from qtool.messages.sentences import count

if TYPE_CHECKING:
    from qtool.verification.finding import Finding, Verdict

_SHOWN = 3  # findings of one check


def verify(
    artifact: Annotated[str, typer.Argument(help="a folder, a .safetensors or a .gguf file")],
    against: Against = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="and whether it would load it: vllm, sglang, transformers, llama.cpp, exllama or "
            "mlx-lm",
            autocompletion=completing.engines,
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that the engine shares it between")] = 1,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="exit status 1 on warnings, too, and where no digest was compared"
        ),
    ] = False,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Check ARTIFACT: tensors, shapes, numbers, configs, tokenizer; exit status 1 on errors."""
    from qtool.api import looking

    verdict = looking.verify(
        artifact, against=against, engine=engine, tp=tp, threads=threads, quiet=json_
    )
    if json_:
        print_json(verdict.json())
    else:
        for line in lines(verdict):
            typer.echo(line)
        if strict and verdict.ok and verdict.doubts:
            typer.echo(f"--strict: fails for {' and '.join(verdict.doubts)}")
    if not verdict.ok or (strict and verdict.doubts):
        raise typer.Exit(1)


def lines(verdict: "Verdict") -> list[str]:
    """For people: findings by check, the errors first, and a last line that sums up."""
    from qtool.messages.printable import printable

    said = []
    for severity in ("error", "warning", "note"):
        groups: dict[str, list[Finding]] = {}
        for finding in verdict.findings:
            if finding.severity == severity:
                groups.setdefault(finding.check, []).append(finding)
        for check, findings in groups.items():
            said += [f"{severity} ({check}): {f.message}" for f in findings[:_SHOWN]]
            if len(findings) > _SHOWN:
                said.append(f"{severity} ({check}): {len(findings) - _SHOWN} more like these")
    layers = sorted(
        (layer for layer in verdict.layers if isfinite(layer.relative_error)),
        key=lambda layer: layer.relative_error,
    )
    if layers:
        middle, worst = layers[len(layers) // 2], layers[-1]
        said.append(
            f"relative error of {count(len(layers), 'matrix')}: median "
            f"{middle.relative_error:.2%}, "
            f"largest {worst.relative_error:.2%} ({worst.name})"
        )
    counts = [
        count(n, what)
        for what in ("error", "warning")
        if (n := sum(f.severity == what for f in verdict.findings))
    ]
    outcome = ", ".join(counts) or "nothing wrong"
    share = verdict.unquantized_share
    amount = "an unknown share" if share is None else f"{share:.1%}"
    what = f"{verdict.format}, {amount} of the weights unquantized"
    nothing = verdict.format == "unknown" and "shapes" not in verdict.checks
    if nothing or tuple(verdict.checks) == ("readable",):
        what = "cannot be opened"
    said.append(f"{verdict.path}: {what}, {count(len(verdict.checks), 'check')}: {outcome}")
    return [printable(line) for line in said]
