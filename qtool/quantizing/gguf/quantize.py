"""`qtool quantize` into GGUF, from a request to a finished file.

open -> plan -> (measure importance) -> stage a file -> piece by piece: read, encode, write
     -> read back and compare -> final name
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints import padding
from qtool.checkpoints.gguf_models import is_gguf, source_files
from qtool.formats.gguf_values import string
from qtool.formats.gguf_writer import GgufWriter, opened
from qtool.gguf.importance.imatrix import Importance, read_importance
from qtool.gguf.open import open_source, open_view
from qtool.gguf.pieces import Done, Encoder, Given, Pieces
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import GgufSource
from qtool.gguf_types import BY_NAME
from qtool.hub import public_name
from qtool.messages.progress import Progress
from qtool.messages.remarks import line
from qtool.messages.summary import LayerReport, Summary, peak_rss_bytes
from qtool.native.sums import checksum
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.planning.gguf.plan_warnings import lacks
from qtool.planning.gguf.planned import GgufPlan
from qtool.quantizing.gguf.measuring import Measured, measured
from qtool.quantizing.gguf.reports import emptied, reports_of
from qtool.record import CHECKSUM_KEY
from qtool.runs import gguf_resume as resume
from qtool.runs import layer_errors
from qtool.runs.gguf_request import GgufRequest
from qtool.runs.gguf_verify import verify
from qtool.runs.zeros import Zeros
from qtool.streaming.in_order import in_order
from qtool.verification.gguf.written import check_written_gguf
from qtool.workspaces.already import taking_up
from qtool.workspaces.journal import Journal
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.watched import marks
from qtool.workspaces.workspace import Workspace, workspace

if TYPE_CHECKING:
    from qtool.transforms.rotated import Rotated


@taking_up
def run_gguf(request: GgufRequest, progress: Progress) -> Summary:
    """Make the file; nothing is left under its name unless all of it succeeds."""
    again = not request.fresh
    check_free(request.artifact, is_folder=False, replace=request.replace, again=again)
    # What is rotated is not 0 where the source is, nor what codes of 0 stand for.
    codes = request.requantize and not is_gguf(request.source)
    zeros = None
    if request.recipe.rotates or codes:
        zeros = Zeros(request.source, request.requantize)
    view = open_view(request.source, request.recipe, request.imatrix, request.requantize, zeros)
    if view is None:
        with closing(open_source(request.source, request.requantize, zeros)) as source:
            return _run(request, source, progress, watched=zeros)
    from qtool.gguf.from_hf.source import hf_source
    from qtool.transforms import rotate

    source = hf_source(view)  # what cannot be written is told before the work
    if not request.recipe.rotates:
        return _run(request, source, progress, view, watched=zeros)
    with progress.stage("transform"):
        rotations = rotate.prepare(view, request.recipe.rotate, progress.say)
    return _run(request, source, progress, view, rotations.notes(), zeros)


def _run(
    request: GgufRequest,
    source: GgufSource,
    progress: Progress,
    view: "Rotated | None" = None,
    said: Sequence[str] = (),
    watched: Zeros | None = None,
) -> Summary:
    """view: the checkpoint that `source` shows, where that is not as it lies there."""
    out = request.artifact
    origin = public_name(request.model, request.source)
    sources = marks([*source_files(source.path), *filter(None, [request.imatrix])])
    importance = None if request.imatrix is None else read_importance(request.imatrix)
    make = partial(
        make_gguf_plan,
        request.recipe,
        source,
        requantize=request.requantize,
        origin=origin,
        threads=request.threads,
        max_ram=request.max_ram,
    )
    plan = make(importance)
    memory = plan.memory
    request = replace(request, threads=memory.setting.threads)
    if request.max_ram is not None:
        progress.say(memory.line())
    notes = [*said]
    if importance is not None and request.recipe.importance:
        notes.append(f"importance is that of {request.imatrix}; none was measured")
    again = (t for t in plan.tensors if t.source.type_in_file.name in BY_NAME and not t.copied)
    needed = source.requantized is not None or next(again, None) is not None
    if request.requantize and not needed:
        notes.append("--requantize was not needed: no quantized tensor is encoded anew")
    if request.places is not None:
        notes += _by_the_cpu(plan)
    warnings = list(plan.warnings)
    for warning in warnings:
        progress.say(line(warning))
    size = plan.size_bytes + memory.disk_bytes
    gpu = None if request.device is None else request.device.name
    facts = resume.facts(request.recipe, source, request.imatrix, gpu)
    with workspace(
        out,
        is_folder=False,
        nbytes=size,
        fresh=request.fresh,
        sources=sources,
        stating=request.stating,
        replace=request.replace,
        facts=facts,
    ) as space:
        space.agree(facts)
        found = measured(request, plan, source, view, progress, space)
        if found is not None:
            plan = make(found.importance, scaled=found.scales)
            notes += padding.explained(found.notes, request.recipe.pad_intermediate)
        elif importance is not None and not any(tensor.importance for tensor in plan.tensors):
            notes.append("no tensor of this recipe makes use of importance")
        found = found or Measured(importance)
        if found.importance is not None:
            lacking = [tensor.name for tensor in plan.tensors if lacks(tensor)]
            notes += found.importance.notes(lacking, {tensor.name for tensor in plan.tensors})
        space.agree(resume.header_fact(plan))
        reports, odd, zeros = _write(request, plan, found, source, progress, space, watched)
        notes += odd
        warnings += zeros
        seconds = {**progress.seconds, "total": progress.total()}
        made = Summary(
            artifact=str(out),
            format="gguf",
            recipe=request.recipe.name,
            seconds={name: round(value, 3) for name, value in seconds.items()},
            peak_rss_bytes=peak_rss_bytes(),
            memory=memory.json(),
            size_bytes=plan.layout.size,
            bits_per_weight=plan.bits_per_weight,
            unquantized_share=plan.unquantized_share,
            tensors=_counts(plan),
            layers=reports,
            warnings=warnings,
            notes=notes,
            dropped=plan.dropped_json(),
        )
        space.conclude(asdict(made))
    return made


def _by_the_cpu(plan: GgufPlan) -> list[str]:
    """Sentences on what a GPU does not do of a plan."""
    from qtool.gguf.gptq.levels import together

    swept = {tensor.type for tensor in plan.tensors if tensor.swept}
    left = sorted(type_.name for type_ in swept if together(type_) > 1)
    said = "GPTQ's points were chosen by the CPU, there being no kernel for GPUs"
    return [f"{said}: {', '.join(left)}"] if left else []


def _write(
    request: GgufRequest,
    plan: GgufPlan,
    found: Measured,
    source: GgufSource,
    progress: Progress,
    space: Workspace,
    watched: Zeros | None,
) -> tuple[list[LayerReport], list[str], list[str]]:
    """The file, read back and compared; its layers, a sentence on those that stand out, and what
    of the source is 0."""
    layout, pieces = plan.layout, Pieces(plan.tensors)
    done, notes = Done(len(pieces)), []
    with opened(space.artifact, layout.size) as descriptor:
        writer = GgufWriter(descriptor, layout)
        with progress.stage("quantize"):
            work = _Work(plan, pieces, done, writer, descriptor, space.journal, watched)
            factors = partial(_factors, found.importance)
            swept = found.sweeping
            given = Given(factors) if swept is None else Given(factors, swept.files.rows)
            _encode(work, given, request, progress)
        reports = reports_of(plan, pieces, done, found.sweeping, request.threads)
        if odd := layer_errors.checked(reports):
            progress.event("flagged", text=odd)
            notes.append(odd)
        with progress.stage("verify"):
            digest = source_checksum(plan, pieces, done)
            writer.text(CHECKSUM_KEY, digest)
            writer.finish()
            written = replace(plan, metadata={**plan.metadata, CHECKSUM_KEY: string(digest)})
            verify(space.artifact, written, layout, pieces, done, request.threads, range)
            check_written_gguf(space.artifact, source)
    if watched is not None:
        zeros = watched.told(space.journal.done.values())
    else:
        zeros = emptied(plan, pieces, done)
    for warning in zeros:
        progress.say(line(warning))
    return reports, notes, zeros


@dataclass(frozen=True)
class _Work:
    """A file under way."""

    plan: GgufPlan
    pieces: Pieces
    done: Done
    writer: GgufWriter
    descriptor: int
    journal: Journal
    watched: Zeros | None  # of what is rotated, or of codes


def _encode(work: _Work, given: Given, request: GgufRequest, progress: Progress) -> None:
    """Every piece of every tensor, read, encoded and written."""
    plan, pieces, done, writer = work.plan, work.pieces, work.done, work.writer
    threads, places = request.threads, request.places
    numbers = resume.take_up(work.descriptor, pieces, done, writer, work.journal, threads)
    if len(numbers) < len(pieces):
        taken = len(pieces) - len(numbers)
        progress.say(f"going on with an earlier run: {taken} of {len(pieces)} pieces are finished")
    commits = resume.Commits(pieces, done, writer, work.journal, work.watched)

    def steps(count: int) -> Iterable[int]:
        return progress.blocks(count, "step")

    if places is not None:
        from qtool.quantizing.gguf import on_device

        file = on_device.File(plan.tensors, pieces, given, writer, done)
        on_device.encode_all(file, numbers, places, threads, commits, steps)
        return

    def worker() -> Callable[[int], None]:
        encoder = Encoder(plan.tensors, pieces, given, writer, done)

        def encode(place: int) -> None:
            encoder(numbers[place])
            commits(numbers[place])

        return encode

    in_order(len(numbers), threads, worker, steps)


def _factors(importance: Importance | None, tensor: PlannedTensor) -> NDArray[np.float32] | None:
    """[matrices, in] where the tensor is encoded with importance."""
    if importance is None or not tensor.importance:
        return None
    matrices = prod(tensor.source.shape[:-2])
    found = importance.entries[tensor.name].reshape(matrices, tensor.source.in_features)
    return np.ascontiguousarray(found, np.float32)


def source_checksum(plan: GgufPlan, pieces: Pieces, done: Done) -> str:
    """16 hexadecimal digits that tell sources of other weights apart; not cryptographic.

    The checksum of every tensor's name, type, shape and pieces' checksums, in the order of
    writing: the same for a checkpoint and for the GGUF file with the same weights.
    """
    parts: list[bytes] = []
    for number, tensor in enumerate(plan.tensors):
        shape = ",".join(map(str, tensor.shape))
        parts.append(f"{tensor.name}\0{tensor.source.type.name}\0{shape}\0".encode())
        parts.append(done.read[pieces.of(number)].astype("<u8").tobytes())
    return f"{checksum(np.frombuffer(b''.join(parts), np.uint8)):016x}"


def _counts(plan: GgufPlan) -> dict[str, int]:
    quantized = sum(tensor.type.name in BY_NAME for tensor in plan.tensors)
    dense = len(plan.tensors) - quantized
    return {"quantized": quantized, "dense": dense, "dropped": len(plan.dropped)}
