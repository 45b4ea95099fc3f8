"""`qtool bench`: every kernel on every instruction set of this machine."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.options import Json

if TYPE_CHECKING:
    from qtool.benching.run import Report


def bench(
    json_: Json = False,
    threads: Annotated[int, typer.Option(min=1, help="threads of each kernel")] = 1,
    kernels: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="only kernels with this in their names; * and ? work"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="the best instruction set alone, and shorter runs")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Time the kernels: million weights a second, and the fraction of what memory allows."""
    from qtool import native
    from qtool.benching.run import QUICK, Settings, cases_named
    from qtool.benching.run import bench as run
    from qtool.errors import UsageError

    if device == "cuda":
        _on_gpu(json_, kernels)
        return
    if device != "cpu":
        raise UsageError(f"--device {device}: expected cpu or cuda")
    settings = dataclasses.replace(QUICK if quick else Settings(), threads=threads)
    cases = cases_named(kernels)
    isas = native.available()
    report = run(cases, settings, isas[-1:] if quick else isas)
    if json_:
        typer.echo(json.dumps(report.json()))
    else:
        _print(report)


def _on_gpu(json_: bool, kernels: str | None) -> None:
    from qtool.benching.cuda import bench as run
    from qtool.benching.cuda import cases_named
    from qtool.cuda.running import require

    cases = cases_named(kernels)
    require()
    import torch

    results = run(cases)
    name = torch.cuda.get_device_name()
    if json_:
        found = {"device": name, "results": [result.json() for result in results]}
        typer.echo(json.dumps(found))
        return
    width = max(len(case.name) for case in cases) + len(" programmatic")
    typer.echo(
        f"{name}, matrices of 8192 x 8192 where no other shape is told, medians; % of a copy"
    )
    for result in results:
        speed = f"{result.bytes_per_s / 1e9:8.1f} GB/s"
        seconds = result.seconds_per_billion
        more = "" if seconds is None else f"  {seconds:.3f} s for 10^9 weights"
        typer.echo(f"{result.name:{width}}  {speed}  {result.fraction:4.0%}{more}")


def _print(report: "Report") -> None:
    from qtool.cli.tables import console, print_table
    from qtool.messages.table import Table

    gained = ("gain", "memory's", "in cache") if report.threads > 1 else ()
    titles = ("kernel", "writes", *report.isas, "memory allows", *gained)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for result in report.results:
        row = rows.setdefault((result.kernel, result.dtype), {})
        row[result.isa] = f"{result.mweights_per_s:.4g}  {result.fraction:4.0%}"
        row.setdefault("memory", f"{result.plain_mweights_per_s:.4g}")
        if gains := result.gains:
            row |= {name: f"{gain:.2f}x" for name, gain in vars(gains).items()}
    columns = [*report.isas, "memory", *(["kernel", "plain", "cached"] * (report.threads > 1))]
    cells = [
        (kernel, dtype, *(row.get(column, "") for column in columns))
        for (kernel, dtype), row in rows.items()
    ]
    where = console()
    print_table(Table(titles, cells, 2), where)
    where.print(
        f"million weights a second, {report.threads} thread(s), medians; % of a plain loop that "
        "reads and writes as much"
    )
    if report.threads > 1:
        where.print(
            f"gain of {report.threads} threads over one: of the kernel, of the plain loop (what "
            "memory has left to give), and of the kernel on rows that stay in caches"
        )
