"""report.html of a matrix, and the figures of quality: each artifact is measured once.

What was measured stays in matrix.json, with what it was measured on; the same command takes it
from there as long as the artifact, the text, the source, the version and the machine are the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from qtool import __version__
from qtool.checkpoints.checkpoint import hash_file
from qtool.matrix.cells import Cell
from qtool.matrix.state import REPORT, Entry, State
from qtool.messages.progress import Progress
from qtool.provenance.record import with_gpu
from qtool.report.facts import Quality
from qtool.report.gather import Request, gather
from qtool.report.page import page
from qtool.workspaces.naming import path_beside

if TYPE_CHECKING:
    from qtool.cuda.device import Device


@dataclass(frozen=True)
class Asked:
    """What the page is about, beside the artifacts."""

    model: str
    out: Path
    text: Path | None  # to measure quality on
    windows: int | None
    command: str
    threads: int
    device: "Device | None" = None  # that measures; None: the CPU


def write(
    asked: Asked,
    source: Path,
    files: Mapping[str, str],
    there: Sequence[Cell],
    entries: Mapping[str, Entry],
    state: State,
    progress: Progress,
) -> str:
    """Write the page about all that is there, and figures into the entries. files: SHA-256 of the
    source's."""
    of = {cell.name: _measured_of(asked, cell, files) for cell in there}
    known = {}
    for cell in there:
        before = _quality(state.figures(cell.name, of[cell.name]))
        if asked.text is not None and before is not None:
            known[str(cell.out)] = before
            progress.say(f"{cell.name}: measured by an earlier run")
    request = Request(
        artifacts=tuple((str(cell.out), cell.out) for cell in there),
        against=None if asked.text is None else (asked.model, source),
        text=asked.text,
        windows=asked.windows,
        length=512,
        figures=(),
        commands=(asked.command,),
        threads=asked.threads,
        known=known,
        device=asked.device,
    )
    progress.say("report")
    with progress.stage("report"):
        found = gather(request, progress)
        labels = {one.label: cell for one, cell in zip(found.artifacts, there, strict=True)}
        for facts, cell in zip(found.artifacts, there, strict=True):
            entry = entries[cell.name]
            entry.size_bytes = facts.size_bytes
            if entry.bits_per_weight is None:
                entry.bits_per_weight = round(facts.bits_per_weight, 4)
        for quality in found.quality:
            if (its := labels.get(quality.artifact)) is not None:
                entry = entries[its.name]
                entry.perplexity, entry.kld = quality.perplexity, quality.kld
                state.measured(its.name, of[its.name], asdict(quality))
        path = asked.out / REPORT
        half = path.with_name(f".{REPORT}.partial")
        _replace(path, half, lambda: half.write_text(page(found), encoding="utf-8"))
    return str(path)


def _measured_of(asked: Asked, cell: Cell, files: Mapping[str, str]) -> dict[str, Any]:
    """What the figures of an artifact depend on."""
    if asked.text is None:
        return {}
    beside = path_beside(cell.out)
    return {
        "artifact": hash_file(beside) if beside.is_file() else None,
        "text": hash_file(asked.text),
        "windows": asked.windows,
        "source": dict(files),
        "version of qtool": __version__,
        "environment": with_gpu(None if asked.device is None else asked.device.name),
    }


def _quality(row: Mapping[str, Any] | None) -> Quality | None:
    """Figures as matrix.json has them; None where they are none."""
    try:
        found = None if row is None else _FIGURES.validate_python(row)
    except ValidationError:
        return None
    numbers = [] if found is None else [n for n in astuple(found) if isinstance(n, float)]
    return found if all(map(math.isfinite, numbers)) else None


def _replace(path: Path, half: Path, write: Callable[[], object]) -> None:
    try:
        write()
        half.replace(path)
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)


_FIGURES = TypeAdapter(Quality)
