"""`qtool quantize`, from a request to a finished artifact.

plan -> stage a folder -> block by block: (collect, transform,) quantize, pack, write
     -> config, tokenizer, model card, provenance -> read back and compare -> final name
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from qtool.cards import modelcard
from qtool.checkpoints import padding
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting.source import opened
from qtool.messages.progress import Progress
from qtool.messages.remarks import line
from qtool.messages.summary import Summary, of_cache, of_text, peak_rss_bytes
from qtool.planning.engines import ROUNDED_SCALES
from qtool.planning.experts import as_quantized
from qtool.planning.notes import unread
from qtool.planning.plan import MAX_SHARD_BYTES, Plan, make_plan
from qtool.provenance import record as provenance
from qtool.provenance.digests import add_digests
from qtool.provenance.outcome import Outcome
from qtool.quantizing.verify import verify
from qtool.runs import layer_errors, resume
from qtool.runs.each_tensor import quantize_each
from qtool.runs.request import Request
from qtool.runs.sink import EngineRotations, Sink
from qtool.runs.zeros import Zeros
from qtool.scheme import Dropped
from qtool.streaming.allocator import give_back
from qtool.texts.calibration import check_length
from qtool.workspaces.already import taking_up
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.watched import Marks, marks
from qtool.workspaces.workspace import Workspace, check_begun, workspace

if TYPE_CHECKING:
    from qtool.streaming.skeleton import Skeleton
    from qtool.transforms.rotated import Rotated
    from qtool.transforms.rotations import Rotations


@dataclass(frozen=True)
class _Begun:
    """What is known of a run before anything is made."""

    checkpoint: Checkpoint  # as it is read: rotated, where the recipe rotates
    rotated: "Rotated | None"  # the same
    sources: Marks
    plan: Plan
    skeleton: "Skeleton | None"  # where it calibrates
    zeros: Zeros  # what is shown the source's bytes


@taking_up
def run(request: Request, progress: Progress) -> Summary:
    """Make the artifact; nothing is left under its name unless all of it succeeds."""
    out = request.artifact
    check_free(out, is_folder=True, replace=request.replace, again=not request.fresh)
    begun = _begin(request, progress)
    checkpoint, plan, skeleton = begun.checkpoint, begun.plan, begun.skeleton
    warnings = _warnings(request, begun)
    request = replace(request, threads=plan.memory.setting.threads)
    if request.max_ram is not None:
        progress.say(plan.memory.line())
    for warning in warnings:
        if warning != ROUNDED_SCALES:
            progress.say(line(warning))
    facts = resume.facts(request, checkpoint)
    with workspace(
        out,
        is_folder=True,
        nbytes=plan.size_bytes + plan.disk_bytes,
        fresh=request.fresh,
        sources=begun.sources,
        stating=request.stating,
        replace=request.replace,
        facts=facts,
    ) as space:
        resume.agree(space, facts, plan)
        given = None
        if skeleton is not None:
            from qtool.blockwise.given import given_to
            from qtool.blockwise.run import quantize_blocks

            with progress.stage("calibrate"):
                given = given_to(request.recipe, checkpoint, request.stats, progress)
            # Before anything that was made with the text is taken up.
            space.agree({"calibration text": given.record})
        rotations = _rotated(request, begun, space, progress)
        with Sink(plan, checkpoint, space.artifact, begun.zeros) as sink:
            if skeleton is not None and given is not None:
                outcome = quantize_blocks(
                    request, plan, checkpoint, sink, progress, space, given, skeleton
                )
            else:
                outcome = quantize_each(request, plan, checkpoint, sink, progress, space.journal)
            outcome = _with_notes(request, outcome, rotations, progress)
            progress.apart("quantize", "pack", sum(sink.pack_seconds) / request.threads)
            with progress.stage("export"):
                _export(request, begun, outcome, rotations, sink)
        give_back()
        with progress.stage("verify"):
            verify(space.artifact, plan, sink.writer.checksums)
            add_digests(space.artifact, request.threads)
            emptied = begun.zeros.told(space.journal.done.values())
        for warning in emptied:
            progress.say(line(warning))
        warnings += emptied
        made = _summary(request, plan, outcome, warnings, progress)
        space.conclude(asdict(made))
    return made


def _begin(request: Request, progress: Progress) -> _Begun:
    """Read what there is, and plan; what takes seconds to import comes last, so that what can be
    told before is."""
    zeros = Zeros(request.source, request.requantize)
    checkpoint = as_quantized(request.recipe, opened(request.source, request.requantize, zeros))
    if request.stats is not None:
        from qtool.blockwise.given import check_stats

        check_stats(request.recipe, request.stats)
    sources = marks([*checkpoint.files, *((request.stats,) if request.stats else ())])
    rotated = _view(request, checkpoint)
    checkpoint = rotated or checkpoint
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
    if not request.recipe.calibrates:
        return _Begun(checkpoint, rotated, sources, plan, None, zeros)
    if request.stats is None:
        check_length(request.recipe.calibration, checkpoint.folder)
    check_begun(request.artifact, resume.facts(request, checkpoint), fresh=request.fresh)
    from qtool.blockwise.run import open_skeleton

    with progress.stage("calibrate"):
        skeleton = open_skeleton(checkpoint, plan)
    if any(plan.by_name[name].scheme is not None for name in skeleton.unknown):
        plan = make(unknown=skeleton.unknown)
    return _Begun(checkpoint, rotated, sources, plan, skeleton, zeros)


def _warnings(request: Request, begun: _Begun) -> list[str]:
    """What a user should know before the work begins."""
    recipe = request.recipe
    warnings = list(begun.plan.warnings)
    if request.stats is not None and not recipe.calibrates:
        warnings.append(f"note: --stats is not used: recipe {recipe.name} looks at no activations")
    warnings += unread(recipe)
    return warnings


def _with_notes(
    request: Request, outcome: Outcome, rotations: "Rotations | None", progress: Progress
) -> Outcome:
    """The outcome with what rotations have to say, and of layers that came out oddly."""
    notes = outcome.notes if rotations is None else [*rotations.notes(), *outcome.notes]
    notes = padding.explained(notes, request.recipe.pad_intermediate)
    if odd := layer_errors.checked(outcome.layers):
        progress.event("flagged", text=odd)
        notes = [*notes, odd]
    return replace(outcome, notes=notes)


def _export(
    request: Request,
    begun: _Begun,
    outcome: Outcome,
    rotations: "Rotations | None",
    sink: Sink,
) -> None:
    """Write what lies beside the tensors: config, tokenizer, model card, record."""
    plan, checkpoint, shards = begun.plan, begun.checkpoint, request.max_shard_bytes
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
    rotated = _engine_rotations(rotations, plan, checkpoint)
    card = modelcard.render(plan, checkpoint, record, outcome.layers, rotated)
    sink.close(record, card, rotated)


def _summary(
    request: Request, plan: Plan, outcome: Outcome, warnings: list[str], progress: Progress
) -> Summary:
    """What the run says of itself when all is written and read back."""
    seconds = {**progress.seconds, "total": progress.total()}
    return Summary(
        artifact=str(request.artifact),
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
    request: Request, begun: _Begun, space: Workspace, progress: Progress
) -> "Rotations | None":
    if begun.rotated is None:
        return None
    from qtool.quantizing.rotations import rotate_source

    return rotate_source(request, begun.plan, begun.rotated, space, progress)


def _engine_rotations(
    rotations: "Rotations | None", plan: Plan, checkpoint: Checkpoint
) -> EngineRotations | None:
    """What is left for engines to rotate, by the names of modules."""
    if rotations is None or not rotations.online:
        return None
    from qtool.artifacts.cache_scales import attention_of

    heads = rotations.online.heads
    blocks = {tensor.name: tensor.block for tensor in plan.tensors}
    known = attention_of(blocks, checkpoint.config, False) if heads else {}
    return EngineRotations(
        {name.removesuffix(".weight"): size for name, size in rotations.online.inputs.items()},
        {
            kept.attention: heads[block]
            for name, kept in known.items()
            if (block := blocks[name]) is not None and block in heads
        },
    )
