"""`qtool matrix`: many artifacts of one model, in the cheapest order, and one report.

    what needs no data -> one pass over the unquantized model -> what shares it -> what does not
                       -> figures of quality -> report.html, matrix.json

The pass measures everything that any of the recipes asks for, once, into a file of statistics, as
`qtool calibrate` does; an artifact that shares it has the bytes that `quantize --stats` makes.
Later blocks are then fitted to the original's activations, where a run by itself fits them to those
of the quantized blocks before: a little is lost for what is saved, and the artifacts record it.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool import __version__
from qtool.checkpoints.checkpoint import Checkpoint, hash_file
from qtool.checkpoints.gguf_models import is_gguf
from qtool.errors import QtoolError, UnsupportedError
from qtool.hub import resolve
from qtool.matrix import locked, page, shared
from qtool.matrix.asked import Asked, Matrix
from qtool.matrix.cells import Cell, cells, passes
from qtool.matrix.making import make
from qtool.matrix.state import GPU, Entry, State
from qtool.messages.progress import Progress
from qtool.messages.summary import peak_rss_bytes
from qtool.provenance import statement
from qtool.recipe.recipe import Recipe
from qtool.streaming.allocator import give_back
from qtool.workspaces.differences import PRECISION
from qtool.workspaces.naming import path_beside
from qtool.workspaces.workspace import may_pass

if TYPE_CHECKING:
    pass

_SET = re.compile(r"--set ([\w.]+)=([\w.-]*\w)")


@dataclass(frozen=True)
class _Run:
    """What all cells have in common."""

    asked: Asked
    source: Path
    files: dict[str, str]  # SHA-256 of the source's files
    state: State
    made: Matrix
    entries: dict[str, Entry]
    progress: Progress
    lasting: set[str] = field(default_factory=set)  # what fails again with the same command
    texts: dict[str, str] = field(default_factory=dict)  # digests, by the settings


def matrix(asked: Asked, progress: Progress) -> Matrix:
    """Make them all. What fails is said in its entry, and the others are made."""
    if asked.text is not None:
        _check_text(asked)
    find = partial(
        cells, asked.recipes, asked.out, asked.sets, error_aware=asked.error_aware,
        changes=asked.changes,
    )  # fmt: skip
    find(share=True)  # what is wrong with them is told before a download
    with progress.stage("download"):
        source = resolve(asked.model)
    found = find(share=not is_gguf(source))
    if asked.out.exists() and os.path.samefile(asked.out, source):
        raise UnsupportedError(f"{asked.out}: is the model itself; choose another -o")
    files = _digests(source)  # of what is no model before there is a folder
    with locked.locked(asked.out) as work:
        entries = {one.name: Entry(one.name, one.out.name, one.calibrated) for one in found}
        made = Matrix(
            asked.model, str(asked.out), list(entries.values()), asked.changes, gpu=asked.gpu
        )
        state = State(asked.out)
        _fill(_Run(asked, source, files, state, made, entries, progress), found, work)
    return made


def _fill(run: _Run, found: Sequence[Cell], work: Path) -> None:
    asked, entries, made, progress = run.asked, run.entries, run.made, run.progress
    waiting = [cell for cell in found if not _settled(run, cell)]
    for cell in waiting:
        if cell.calibrated == "no data":
            _attempt(run, cell, None)
        else:
            with _failing(run, [cell]):
                _foresee(run, cell)
    waiting = [cell for cell in waiting if entries[cell.name].status == "waiting"]
    for group in passes(waiting):
        with _failing(run, group):
            place = _place(run, group, work)
            measured = shared.measure(
                group, run.source, place, asked.threads, progress, asked.fresh, asked.device
            )
            made.passes.append(measured.json())
            for cell in group:
                _attempt(run, cell, measured)
    for group in passes(found):
        with suppress(QtoolError):  # of its text, which is among its cells' errors
            if all(_done_with(run, cell) for cell in group):
                locked.remove(_place(run, group, work))
    for cell in waiting:
        if cell.calibrated == "itself":
            _attempt(run, cell, None)
    there = [cell for cell in found if entries[cell.name].status != "failed"]
    if there:
        made.report = page.write(
            page.Asked(
                asked.model, asked.out, asked.text, asked.windows, asked.command, asked.threads,
                asked.device,
            ),
            run.source, run.files, there, entries, run.state, progress,
        )  # fmt: skip
    if left := locked.left(work):
        made.kept = {"path": str(work), "size_bytes": locked.size_of(left)}
    made.seconds, made.peak_rss_bytes = progress.total(), peak_rss_bytes()
    run.state.write(made.json())


def _place(run: _Run, group: Sequence[Cell], work: Path) -> Path:
    """Where the statistics of a pass lie."""
    return work / _text(run, group[0])[:16]


def _done_with(run: _Run, cell: Cell) -> bool:
    """Whether the same command would not need the cell's statistics."""
    return run.entries[cell.name].status in ("made", "kept") or cell.name in run.lasting


def _check_text(asked: Asked) -> None:
    from qtool.quality.evaluate import Protocol, check_protocol

    assert asked.text is not None
    check_protocol(Protocol("plain", asked.text, asked.windows, 512))


def _digests(source: Path) -> dict[str, str]:
    """SHA-256 of the files that make the model."""
    if is_gguf(source):
        files = [source] if source.is_file() else sorted(source.glob("*.gguf"))
        return {file.name: hash_file(file) for file in files}
    return dict(Checkpoint.open(source).file_digests)


def _wanted(run: _Run, cell: Cell) -> dict[str, Any]:
    """What the artifact depends on."""
    text = None if cell.calibrated == "no data" else _text(run, cell)
    own: dict[str, Any] = {"version of qtool": __version__, "source": run.files}
    own["calibration text"] = text
    if cell.is_folder:
        own["size of a shard"] = run.asked.max_shard_bytes
    if run.asked.gpu is not None and text is not None:
        own[GPU] = run.asked.gpu
    if cell.settings.precision != "float32" and text is not None:
        from qtool.streaming.precision import made_in

        if (made := made_in(cell.settings.precision, run.asked.device)) != "float32":
            own[PRECISION] = made
    return cell.wanted() | own


def _text(run: _Run, cell: Cell) -> str:
    """The digest of what a cell is calibrated on."""
    settings = cell.settings
    key = settings.model_dump_json()
    if key not in run.texts:
        run.texts[key] = shared.text_digest(settings, run.source, run.progress)
    return run.texts[key]


def _settled(run: _Run, cell: Cell) -> bool:
    """Whether there is nothing to do: it is made already, or cannot be."""
    entry = run.entries[cell.name]
    with _failing(run, [cell]):
        if run.state.is_there(cell.name, cell.out, _wanted(run, cell)):
            _verified(run, cell)
            entry.status = "kept"
            run.progress.say(f"{cell.name}: kept, made by an earlier run")
    return entry.status != "waiting"


def _verified(run: _Run, cell: Cell) -> None:
    """Where a run died between an artifact and its statement: look at the one, write the other."""
    from qtool.errors import FormatError
    from qtool.verification.run import verify_artifact

    if path_beside(cell.out).is_file():
        return
    quiet = Progress(quiet=True)
    verdict = verify_artifact(cell.out, progress=quiet, threads=run.asked.threads)
    if not verdict.ok:
        said = next(one.message for one in verdict.findings if one.severity == "error")
        raise FormatError(f"{cell.out}: {said}; remove it, and the same command makes it again")
    gpu = None if cell.calibrated == "no data" else run.asked.gpu
    ran = statement.Ran(run.asked.model, run.source, run.asked.threads, gpu=gpu)
    statement.write(cell.out, ran)


@contextmanager
def _failing(run: _Run, group: Sequence[Cell]) -> Iterator[None]:
    """What goes wrong in the body is an error of these cells, and no more than that."""
    try:
        yield
    except (QtoolError, OSError, MemoryError) as error:
        said = _advice(run, str(error)) or type(error).__name__
        for cell in group:
            entry = run.entries[cell.name]
            if entry.status == "waiting":
                entry.status, entry.error = "failed", said
                if not may_pass(error):
                    run.lasting.add(cell.name)
                # The sentence itself is in the result.
                run.progress.say(f"{cell.name}: failed, as is told at the end")


def _foresee(run: _Run, cell: Cell) -> None:
    """What headers tell to be impossible is told before a text is passed through the model."""
    if not isinstance(cell.recipe, Recipe) or is_gguf(run.source):
        return
    from qtool.converting.source import opened
    from qtool.planning.experts import as_quantized
    from qtool.planning.plan import make_plan

    source = opened(run.source, requantize=False)
    make_plan(cell.recipe, as_quantized(cell.recipe, source), run.asked.max_shard_bytes)


def _attempt(run: _Run, cell: Cell, measured: shared.Measured | None) -> None:
    """Make one artifact and the statement beside it."""
    entry = run.entries[cell.name]
    began, wall = time.monotonic(), time.time()
    run.progress.say(f"{cell.name}: begins ({cell.calibrated})")
    with _failing(run, [cell]):
        run.state.begin(cell.name, _wanted(run, cell), run.made.json())
        own = Progress(quiet=True)
        summary = make(run.asked, run.source, cell, measured, own)
        statement.write(
            cell.out,
            statement.Ran(
                run.asked.model,
                run.source,
                run.asked.threads,
                summary.seconds,
                summary.peak_rss_bytes,
                wall,
                measured.imatrix if measured is not None and not cell.is_folder else None,
                measured.stats if measured is not None and cell.is_folder else None,
                gpu=run.asked.gpu,
            ),
        )
        entry.status, entry.size_bytes = "made", summary.size_bytes
        entry.bits_per_weight = round(summary.bits_per_weight, 4)
        entry.notes = [*summary.warnings, *summary.notes]
        for note in summary.warnings:
            if "has no effect" in note:  # such as of what --set says for all
                run.progress.say(f"{cell.name}: {note}")
        entry.seconds = round(time.monotonic() - began, 3)
        run.progress.say(f"{cell.name}: {entry.size_bytes / 1e6:.1f} MB in {entry.seconds:.1f} s")
    if entry.status == "failed" and not cell.out.exists():
        run.state.forget(cell.name)
    give_back()


def _advice(run: _Run, said: str) -> str:
    return in_a_file(said) if len(run.asked.recipes) > 1 else said


def in_a_file(said: str) -> str:
    """A sentence that advises --set, which would change the other recipes of a matrix, too: what
    is for one of them is written into a file."""
    found = _SET.sub(r"`\1: \2`", said)
    return found if found == said else f"{found}; write it into a recipe file of your own"
