"""`qtool quantize`, from a request to a finished artifact.

plan -> stage a folder -> block by block: (collect, transform,) quantize, pack, write
     -> config, tokenizer, model card, provenance -> read back and compare -> final name
"""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qtool import methods
from qtool.checkpoints import padding, structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.source import opened
from qtool.dequantize import dequantize
from qtool.methods import rtn
from qtool.planning.engines import ROUNDED_SCALES
from qtool.planning.experts import as_quantized
from qtool.planning.notes import unread
from qtool.planning.plan import MAX_SHARD_BYTES, Plan, make_plan
from qtool.planning.planned import Planned
from qtool.planning.shapes import CACHED_AT_ONCE, ROWS_AT_ONCE
from qtool.planning.shared_scales import SharedScales
from qtool.remarks import line
from qtool.runs import layer_errors, modelcard, provenance, resume
from qtool.runs.already import taking_up
from qtool.runs.by_rows import nearest, quantize_rows, side_by_side
from qtool.runs.digests import add_digests
from qtool.runs.journal import Journal
from qtool.runs.outcome import Outcome
from qtool.runs.progress import Progress
from qtool.runs.request import Request
from qtool.runs.sink import Sink, Turned, check_values
from qtool.runs.summary import WEIGHTS, LayerReport, Summary, of_cache, of_text, peak_rss_bytes
from qtool.runs.verify import verify
from qtool.runs.watched import marks
from qtool.runs.workspace import Workspace, check_begun, check_free, workspace
from qtool.scheme import Dropped, GroupQuant, Scheme
from qtool.streaming.allocator import give_back
from qtool.streaming.weights import is_view, rows_of
from qtool.texts.calibration import check_length

if TYPE_CHECKING:
    from qtool.transforms.rotated import Rotated
    from qtool.transforms.rotations import Rotations


@taking_up
def run(request: Request, progress: Progress) -> Summary:
    """Make the artifact; nothing is left under its name unless all of it succeeds."""
    out = request.artifact
    check_free(out, is_folder=True, replace=request.replace, again=not request.fresh)
    checkpoint = as_quantized(request.recipe, opened(request.source, request.requantize))
    if request.stats is not None:
        from qtool.calibrating.given import check_stats

        check_stats(request.recipe, request.stats)
    sources = marks([*checkpoint.files, *((request.stats,) if request.stats else ())])
    view = _view(request, checkpoint)
    checkpoint = view or checkpoint
    make = partial(
        make_plan,
        request.recipe,
        checkpoint,
        request.max_shard_bytes,
        compare_all=True,
        threads=request.threads,
        max_ram=request.max_ram,
        from_stats=request.stats is not None,
    )
    plan = make()
    skeleton = None
    if request.recipe.calibrates:
        # These take seconds to import; what can be told before is.
        if request.stats is None:
            check_length(request.recipe.calibration, checkpoint.folder)
        check_begun(out, resume.facts(request, checkpoint), fresh=request.fresh)
        from qtool.calibrating.blockwise import open_skeleton, quantize_blocks
        from qtool.calibrating.given import given_to

        with progress.stage("calibrate"):
            skeleton = open_skeleton(checkpoint, plan)
        if any(plan.by_name[name].scheme is not None for name in skeleton.unknown):
            plan = make(unknown=skeleton.unknown)
    warnings = list(plan.warnings)
    if request.stats is not None and not request.recipe.calibrates:
        warnings.append(
            f"note: --stats is not used: recipe {request.recipe.name} looks at no activations"
        )
    warnings += unread(request.recipe)
    if request.recipe.calibrates and request.stats is None:
        length = request.recipe.calibration.length
        past = structure.past_positions(checkpoint.config, length, "calibration samples")
        warnings += [past] if past is not None else []
    request = replace(request, threads=plan.memory.setting.threads)
    if request.max_ram is not None:
        progress.say(plan.memory.line())
    for warning in warnings:
        if warning == ROUNDED_SCALES:
            continue
        progress.say(line(warning))
    size = plan.size_bytes + plan.disk_bytes
    facts = resume.facts(request, checkpoint)
    with workspace(
        out,
        is_folder=True,
        nbytes=size,
        fresh=request.fresh,
        sources=sources,
        stating=request.stating,
        replace=request.replace,
        facts=facts,
    ) as space:
        resume.agree(space, facts, plan)
        given = None
        if skeleton is not None:
            with progress.stage("calibrate"):
                given = given_to(request.recipe, checkpoint, request.stats, progress)
            # Before anything that was made with the text is taken up.
            space.agree({"calibration text": given.record})
        rotations = None if view is None else _rotated(request, plan, view, space, progress)
        with Sink(plan, checkpoint, space.artifact) as sink:
            if skeleton is not None and given is not None:
                outcome = quantize_blocks(
                    request, plan, checkpoint, sink, progress, space, given, skeleton
                )
            else:
                outcome = _quantize_each(request, plan, checkpoint, sink, progress, space.journal)
            if rotations is not None:
                outcome = replace(outcome, notes=[*rotations.notes(), *outcome.notes])
            notes = padding.explained(outcome.notes, request.recipe.pad_intermediate)
            outcome = replace(outcome, notes=notes)
            if odd := layer_errors.checked(outcome.layers):
                progress.event("flagged", text=odd)
                outcome = replace(outcome, notes=[*outcome.notes, odd])
            progress.apart("quantize", "pack", sum(sink.pack_seconds) / request.threads)
            with progress.stage("export"):
                shards = request.max_shard_bytes
                record = provenance.record(
                    request.recipe,
                    checkpoint,
                    request.model,
                    outcome,
                    None if shards == MAX_SHARD_BYTES else shards,
                    None if request.device is None else request.device.name,
                )
                if rotations is not None:
                    record["rotation"] = rotations.record(request.recipe.rotate)
                turned = _turned(rotations, plan, checkpoint)
                card = modelcard.render(plan, checkpoint, record, outcome.layers, turned)
                sink.close(record, card, turned)
        give_back()
        with progress.stage("verify"):
            verify(space.artifact, plan, sink.writer.checksums)
            add_digests(space.artifact, request.threads)
        seconds = {**progress.seconds, "total": progress.total()}
        made = Summary(
            artifact=str(out),
            format=plan.format,
            recipe=request.recipe.name,
            seconds={name: round(value, 3) for name, value in seconds.items()},
            peak_rss_bytes=peak_rss_bytes(),
            memory=plan.memory.json(),
            size_bytes=plan.size_bytes,
            bits_per_weight=plan.bits_per_weight,
            unquantized_share=plan.unquantized_share,
            tensors=plan.counts,
            layers=outcome.layers,
            experts=outcome.experts,
            outliers=outcome.outliers,
            warnings=warnings,
            notes=[*_made_with(request, plan), *outcome.notes],
            dropped=[
                {"name": tensor.name, "reason": tensor.action.reason}
                for tensor in plan.tensors
                if isinstance(tensor.action, Dropped)
            ],
        )
        space.conclude(asdict(made))
    return made


def _made_with(request: Request, plan: Plan) -> list[str]:
    """What a user is told, and is recorded elsewhere: scales of the cache, the text."""
    recipe = request.recipe
    scales = sum(math.prod(spec.shape) for kept in plan.cache.values() for spec in kept.specs())
    own = not recipe.calibrates or request.stats is not None or recipe.calibration.source
    return [*of_cache(scales, len(plan.cache)), *of_text(bool(own))]


def _view(request: Request, checkpoint: Checkpoint) -> "Rotated | None":
    """The source as its rotated self, where the recipe rotates."""
    if not request.recipe.rotates:
        return None
    from qtool.transforms.rotated import untied

    return untied(checkpoint, stream=request.recipe.rotate.r1)


def _rotated(
    request: Request, plan: Plan, view: "Rotated", space: Workspace, progress: Progress
) -> "Rotations":
    from qtool.runs.rotations import rotate_source

    return rotate_source(request, plan, view, space, progress)


def _turned(rotations: "Rotations | None", plan: Plan, checkpoint: Checkpoint) -> Turned | None:
    """What is left for engines to rotate, by the names of modules."""
    if rotations is None or not rotations.online:
        return None
    from qtool.planning.cache import attention_of

    heads = rotations.online.heads
    blocks = {tensor.name: tensor.block for tensor in plan.tensors}
    known = attention_of(blocks, checkpoint.config, False) if heads else {}
    return Turned(
        {name.removesuffix(".weight"): size for name, size in rotations.online.inputs.items()},
        {
            kept.attention: heads[block]
            for name, kept in known.items()
            if (block := blocks[name]) is not None and block in heads
        },
    )


def _quantize_each(
    request: Request,
    plan: Plan,
    checkpoint: Checkpoint,
    sink: Sink,
    progress: Progress,
    journal: Journal,
) -> Outcome:
    """Without a forward pass every tensor stands alone; some rows of one a thread are in memory."""
    shared = SharedScales(plan, checkpoint)
    rounding, beside = rtn.rounding_on(request.device), side_by_side(request.device)

    def work(planned: Planned) -> LayerReport | None:
        if isinstance(planned.action, Dropped):
            return None
        if not isinstance(planned.action, Scheme):
            sink.dense(planned)
            return None
        if planned.action.by_rows:
            return _by_rows(request, planned, checkpoint, shared, sink, beside)
        options = rtn.Options(request.recipe.clips, shared.largest(planned))
        weight = checkpoint.float32(planned.name)
        check_values(weight.reshape(-1), 0, planned, checkpoint)
        with methods.named(planned.name):
            quant = rtn.quantize(weight, None, planned.action, options, 1, rounding).quant
        sink.quantized(planned, quant)
        found = dequantize(quant)
        coarse = layer_errors.coarseness(weight, found, planned.action)
        error = _norms(weight, found)
        return LayerReport(planned.name, str(planned.action), error, WEIGHTS, coarse)

    units = [*range(plan.blocks.count), None]
    with progress.stage("quantize"):
        done = {block: resume.finished(journal, sink, block) for block in units}
    resume.say(progress, sum(one is not None for one in done.values()), len(done))
    with _pool(request.threads) as pool, progress.stage("quantize"):

        def start(block: int | None) -> list[Future[LayerReport | None]]:
            if done[block] is not None:
                return []
            return [pool.submit(work, planned) for planned in plan.by_block.get(block, ())]

        def finish(block: int | None, futures: list[Future[LayerReport | None]]) -> None:
            if done[block] is None:
                reports = [report for future in futures if (report := future.result()) is not None]
                outcome = done[block] = Outcome(layers=reports)
                resume.commit(journal, sink, block, outcome, None)

        outside = start(None)
        leading = next((i for i in range(plan.blocks.count) if done[i] is None), plan.blocks.count)
        for index in progress.blocks(plan.blocks.count, first=leading):
            finish(index, start(index))
        finish(None, outside)
    return Outcome(layers=[layer for one in done.values() if one for layer in one.layers])


def _by_rows(
    request: Request,
    planned: Planned,
    checkpoint: Checkpoint,
    shared: SharedScales,
    sink: Sink,
    rounding: rtn.Rounding,
) -> LayerReport:
    """Round a matrix to nearest and write it, some rows in memory at a time; of the head, which is
    as long as a vocabulary, a view makes no more than these, either."""
    scheme = planned.action
    assert isinstance(scheme, Scheme)
    rounded = partial(
        nearest,
        scheme=scheme,
        recipe=request.recipe,
        rounding=rounding,
        largest=shared.largest_of_all(planned) if scheme.is_float and scheme.outer else None,
    )
    outside = planned.block is None
    many = request.device is not None or (outside and is_view(checkpoint))
    found = quantize_rows(
        planned,
        checkpoint,
        rounded,
        sink.packed,
        read=rows_of(checkpoint, planned.name, in_parts=outside),
        weights=ROWS_AT_ONCE if many else CACHED_AT_ONCE,
    )
    sink.plain(found.arrays)
    return LayerReport(planned.name, str(scheme), found.error, WEIGHTS, found.coarseness)


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that, when the body fails, begin nothing more."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def frobenius_error(weight: NDArray[np.float32], quant: GroupQuant) -> float:
    """Norm of W - Q over the norm of W; 0 for a zero matrix."""
    return _norms(weight, dequantize(quant))


def _norms(weight: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """The same. found: Q, written over.

    numpy's own sums: those of BLAS depend on its threads, and the number goes into the card.
    """
    size = float((weight * weight).sum(dtype=np.float64))
    lost = np.subtract(weight, found, out=found)
    lost *= lost
    return math.sqrt(float(lost.sum(dtype=np.float64)) / size) if size else 0.0
