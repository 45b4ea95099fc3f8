"""Going on where an earlier run stopped: what makes it the same run, and what it had finished.

A unit is a decoder block, or what is outside of blocks. Its line in the journal has the CRC-32 of
every tensor written, the reports, and, where blocks feed each other, the checksums of the hidden
states that follow it. Nothing of it is believed before the bytes on the disk agree.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.padding import in_view
from qtool.messages.progress import Progress
from qtool.messages.summary import (
    OUTPUTS,
    WEIGHTS,
    ExpertReport,
    LayerReport,
    OutlierReport,
    TunedReport,
)
from qtool.planning.plan import Plan
from qtool.provenance import record as provenance
from qtool.provenance.outcome import Outcome
from qtool.runs.request import Request
from qtool.runs.sink import Sink
from qtool.workspaces import program
from qtool.workspaces.differences import DEVICE, LAYOUT, SHARDS
from qtool.workspaces.identity import file_facts
from qtool.workspaces.journal import Journal
from qtool.workspaces.workspace import Workspace

OUTSIDE = "outside of blocks"


def unit(block: int | None) -> str:
    """The name of a unit in the journal."""
    return OUTSIDE if block is None else f"block {block}"


def agree(space: Workspace, known: Mapping[str, Any], plan: Plan) -> None:
    """ResumeError where what is in `space` was begun with another recipe, source or version.

    known: see `facts`.
    """
    headers = hashlib.sha256(b"".join(file.header for file in plan.layout.files))
    space.agree({**known, LAYOUT: headers.hexdigest()})


def facts(request: Request, checkpoint: Checkpoint) -> dict[str, Any]:
    """What makes it the same run, but for the layout that it comes to.

    Of the source's files sizes, times and some bytes are compared: digests would have to read all.
    """
    found = {
        **program.facts(),
        "recipe": {"name": request.recipe.name, **request.recipe.effective()},
        "source": source_facts(checkpoint),
        SHARDS: request.max_shard_bytes,
    }
    if request.stats is not None and request.recipe.calibrates:
        found["file of statistics"] = file_facts(request.stats)
    if request.recipe.depends_on_cpu:
        found["version of torch or kind of CPU"] = provenance.environment()
        found[DEVICE] = "cpu" if request.device is None else request.device.name
    return found


def source_facts(checkpoint: Checkpoint) -> Any:
    """What tells one source from another without reading all of it."""
    made_from = provenance.made_from(checkpoint)
    padded = in_view(checkpoint)  # which the recipe tells
    files = [*checkpoint.files]
    config = (checkpoint if padded is None else padded.original).config
    if checkpoint.stored_as is not None:  # as other files may say, too
        config = checkpoint.config_as_stored
        files += sorted(checkpoint.folder.glob("*quant*config*.json"))
    return [config, made_from, *(file_facts(file) for file in files)]


def commit(
    journal: Journal, sink: Sink, block: int | None, outcome: Outcome, hidden: list[int] | None
) -> None:
    """A unit is written; hidden: the checksums of the states that the next block begins with."""
    journal.commit(
        unit(block),
        checksums=sink.checksums(block),
        layers=[asdict(layer) for layer in outcome.layers],
        notes=outcome.notes,
        experts=[asdict(report) for report in outcome.experts],
        outliers=[asdict(report) for report in outcome.outliers],
        tuned=[asdict(report) for report in outcome.tuned],
        hidden=hidden,
        zeros=[] if sink.zeros is None else sink.zeros.seen,
    )


def outcome_of(entry: Mapping[str, Any]) -> Outcome | None:
    """What commit() was given; None for a line that it never wrote."""
    try:
        layers = [LayerReport(**layer) for layer in entry["layers"]]
        experts = [ExpertReport(**report) for report in entry["experts"]]
        outliers = [OutlierReport(**report) for report in entry["outliers"]]
        tuned = [TunedReport(**report) for report in entry["tuned"]]
        notes = list(entry["notes"])
    except (KeyError, TypeError):
        return None
    good = (
        all(isinstance(note, str) for note in notes)
        and all(isinstance(one.name, str) and isinstance(one.scheme, str) for one in layers)
        and all(isinstance(one.relative_error, int | float) for one in layers)
        and all(one.of in (OUTPUTS, WEIGHTS) for one in layers)
        and all(isinstance(one.name, str) and isinstance(one.tokens, list) for one in experts)
        and all(type(count) is int for one in experts for count in one.tokens)
        and all(isinstance(one.name, str) and isinstance(one.columns, list) for one in outliers)
        and all(type(one.before) is float and type(one.after) is float for one in tuned)
    )
    return Outcome(layers, notes, None, experts, outliers, tuned) if good else None


def finished(journal: Journal, sink: Sink, block: int | None) -> Outcome | None:
    """A unit that an earlier run finished, if the files have all of it; it is forgotten else."""
    entry = journal.done.get(unit(block))
    if entry is None:
        return None
    outcome = outcome_of(entry)
    if outcome is None or not sink.restore(block, entry.get("checksums")):
        journal.forget_from(unit(block))
        return None
    return outcome


def finished_blocks(
    journal: Journal,
    sink: Sink,
    count: int,
    take_up: Callable[[int, Any], bool],
    last: bool = False,
) -> list[Outcome]:
    """The leading blocks that are finished, of those whose following hidden states are there.

    take_up(index, kept): whether the states before block `index` were found and put in place. last:
    those behind the last block are needed, too.
    """
    done: list[Outcome] = []
    while len(done) < count and (outcome := finished(journal, sink, len(done))) is not None:
        done.append(outcome)
    while done and (len(done) < count or last):
        name = unit(len(done) - 1)
        entry = journal.done.get(name)  # lines out of their order take others with them
        if entry is not None and take_up(len(done), entry.get("hidden")):
            break
        sink.forget(len(done) - 1)
        if entry is not None:
            journal.forget_from(name)
        done.pop()
    return done


def say(progress: Progress, done: int, count: int) -> None:
    """Tell the user what is taken over."""
    if done:
        progress.say(f"going on with an earlier run: {done} of {count} steps are finished")
