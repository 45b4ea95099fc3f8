"""`qtool report`: what is known of some artifacts, as one HTML page that needs nothing else."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.options import Against, Artifacts, Json, Threads, WindowLength, Windows
from qtool.messages.printable import printable


def report(
    artifacts: Artifacts,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="the HTML page to write")] = None,
    against: Against = None,
    text: Annotated[
        Path | None, typer.Option(help="measure quality on it, as `qtool eval` does")
    ] = None,
    windows: Windows = None,
    length: WindowLength = 512,
    eval_: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="figures that `qtool eval --json` or `compare --json` wrote"),
    ] = None,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Write a page about ARTIFACTS: size, errors of layers, codes, quality, checks, provenance.

    One that fails its checks is on the page, too; the command then ends with 1.
    """
    from qtool.streaming.allocator import share_heap

    share_heap()
    from qtool.errors import FormatError, UsageError
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.report.facts import Report
    from qtool.report.gather import Request, gather
    from qtool.report.written import written
    from qtool.texts.source import text_file
    from qtool.workspaces.leftovers import check_free

    if out is None and not json_:
        raise UsageError("nothing to write; give -o report.html, or --json, or both")
    if text is None and windows is not None:
        raise UsageError("--windows counts windows of a text; give --text FILE too")
    if out is not None:
        check_free(out, is_folder=False, again=True)
    words = ["qtool", "report", *artifacts]
    options = {"--against": against, "--text": text, "--windows": windows}
    for option, value in options.items():
        words += [option, str(value)] if value is not None else []
    words += ["--length", str(length)] if text is not None and length != 512 else []
    for figures in eval_ or ():
        words += ["--eval", str(figures)]
    request = Request(
        artifacts=tuple((typed, resolve(typed)) for typed in artifacts),
        against=None if against is None else (against, resolve(against)),
        text=None if text is None else text_file(text),
        windows=windows,
        length=length,
        figures=tuple(eval_ or ()),
        commands=(shlex.join([*words, "-o", str(out or "report.html")]),),
        threads=threads or default_threads(),
    )
    progress = Progress(quiet=json_)

    def gathered() -> Report:
        return gather(request, progress)

    found = gathered().json() if out is None else written(request, out, gathered, progress)
    if json_:
        typer.echo(json.dumps(found, allow_nan=False))
    elif out is not None:
        count = len(found["artifacts"])
        of = f"{count} artifacts" if count > 1 else "1 artifact"
        typer.echo(printable(f"{out}: a page about {of}, {out.stat().st_size:,} bytes"))
    failing = [one["path"] for one in found["artifacts"] if not one["ok"]]
    if failing:
        says = "its findings say" if json_ else f"{out} says"
        do = "does not pass its" if len(failing) == 1 else "do not pass their"
        raise FormatError(f"{', '.join(failing)}: {do} checks; {says} which, and why")
