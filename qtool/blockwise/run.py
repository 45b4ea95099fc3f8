"""Methods that look at activations: one decoder block after another, each fed by quantized ones.

    for each block:  read it -> collect statistics of its inputs -> transform -> quantize each site
                     (-> tune) -> write -> run it with the quantized weights: the next block's input

So later blocks are fitted to the errors that earlier ones really make. Within a block the
statistics are those of its unquantized weights; with gptq.gptaq, which compares one input after
another with the original model's, those behind what is quantized already. With statistics from a
file (`--stats`) nothing is collected and only a probe passes through the blocks, to prove that
transforms change nothing.
"""

from contextlib import ExitStack
from typing import Any

from qtool.artifacts.cache_scales import unmeasurable
from qtool.blockwise.experts import experts_note
from qtool.blockwise.given import Given
from qtool.blockwise.head import measured, planned_head, quantize_head, quantized_outside
from qtool.blockwise.one_block import Run, quantize_block
from qtool.blockwise.originals import Originals, gptaq_note, tuned_note
from qtool.blockwise.row_feedback import Feedback
from qtool.blockwise.row_feedback import told as fed
from qtool.blockwise.tuning import Tuning
from qtool.calibrating import outliers
from qtool.calibrating.guidance import Guidance, told
from qtool.calibrating.placed import Passage, ahead
from qtool.calibrating.sites import Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import SourceError
from qtool.gradients.block_gradients import Ends
from qtool.messages.progress import Progress
from qtool.messages.summary import LayerReport
from qtool.planning.plan import Plan
from qtool.planning.shared_scales import SharedScales
from qtool.provenance.outcome import Outcome, merged
from qtool.recipe.file import said_of
from qtool.runs import resume
from qtool.runs.request import Request
from qtool.runs.sink import Sink
from qtool.scheme import Dropped
from qtool.streaming.hidden import OnDisk, keep, take_up
from qtool.streaming.precision import settled
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.workspaces.workspace import Workspace

NOT_ERROR_AWARE = "statistics from a file, used unchanged: not error-aware"
_ALIKE = "all tokens count alike: a statistics file holds no text for gptq.guided to look at"
_ALONE = (
    "rows do not compensate for each other: a statistics file holds no text for gptq.yaqa to go by"
)


def quantize_blocks(
    request: Request,
    plan: Plan,
    checkpoint: Checkpoint,
    sink: Sink,
    progress: Progress,
    space: Workspace,
    given: Given,
    skeleton: Skeleton | None = None,
) -> Outcome:
    """Quantize every block in turn. skeleton: of open_skeleton(), where it is open already."""
    recipe, journal, device = request.recipe, space.journal, request.device
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(request.threads))
        with progress.stage("calibrate"):
            skeleton = skeleton or open_skeleton(checkpoint, plan)
            asked = recipe.calibration.precision if given.saved is None else "float32"
            precision = settled(asked, device, progress, space)
            feedback = None
            if recipe.feeds_back and given.saved is None:
                feedback = Feedback(
                    Ends.of(
                        recipe.feeds_back, skeleton, given.tokens, recipe.calibration.seed, space,
                        request.threads, progress, device, precision,
                    )
                )  # fmt: skip
            states = OnDisk(space.folder) if plan.memory.setting.states_on_disk else None
            stream = skeleton.embed(given.tokens, states=states)
        shared = SharedScales(plan, checkpoint)
        blocks = stack.enter_context(ahead(skeleton, device))
        passage = Passage.of(stream, workers, device, precision)
        originals = None
        if recipe.follows_original:
            originals = Originals.of(skeleton, passage, space.folder)
        tuning = Tuning(originals, recipe.tune) if originals and recipe.tunes else None
        guides = recipe.guides if given.saved is None else 0.0  # a file holds no text
        guidance = Guidance(guides, recipe.calibration.seed) if guides else None
        run = Run(
            recipe, plan, journal, sink, progress, passage, skeleton, Tracer(), given.saved, shared,
            blocks, originals, tuning, guidance, feedback, planned_head(plan),
        )  # fmt: skip
        outside = resume.finished(journal, sink, None)
        done = _taken_up(run, space, outside is None)
        resume.say(progress, len(done) + (outside is not None), skeleton.count + 1)
        if outside is None and run.head is None:
            outside = _write_outside(run)
        for index in progress.blocks(skeleton.count, first=len(done)):
            outcome = quantize_block(run, index)
            with progress.stage("export"):
                hidden = None
                if run.goes_on(index):
                    hidden = keep(space.folder, index + 1, stream, workers)
                    hidden += [] if originals is None else originals.keep(index + 1)
                resume.commit(journal, sink, index, outcome, hidden)
            done.append(outcome)
        done.append(_write_outside(run) if outside is None else outside)
    position = {name: number for number, name in enumerate(plan.by_name)}
    layers = sorted(
        (layer for one in done for layer in one.layers), key=lambda layer: position[layer.name]
    )
    experts = [report for one in done for report in one.experts]
    notes = [] if given.saved is None else [NOT_ERROR_AWARE]
    if given.saved is not None:
        notes += [_ALIKE] if recipe.guides else []
        notes += [_ALONE] if recipe.feeds_back else []
    said = [note for one in done for note in one.notes]
    notes += experts_note(experts, recipe) + merged(fed(told(said, skeleton.count), skeleton.count))
    notes += gptaq_note(recipe.compensates)
    notes += tuned_note([report for one in done for report in one.tuned])
    found = [report for one in done for report in one.outliers]
    if recipe.reports_outliers:
        notes.append(outliers.note(found, recipe.llm_int8.threshold))
    record = {**given.record, **said_of(precision)}
    return Outcome(layers, notes, record, experts, found)


def _taken_up(run: Run, space: Workspace, more: bool) -> list[Outcome]:
    """What an earlier run finished; the stream is then where that run stopped. more: what is
    outside of the blocks is still to be done."""

    stream, workers, originals = run.passage.stream, run.passage.workers, run.originals

    def found(index: int, kept: Any) -> bool:
        if originals is not None:
            return originals.take_up(space.folder, index, kept)
        return take_up(space.folder, index, kept, stream, workers)

    with run.progress.stage("calibrate"):
        last = more and run.sees_head
        return resume.finished_blocks(space.journal, run.sink, run.skeleton.count, found, last)


def open_skeleton(checkpoint: Checkpoint, plan: Plan) -> Skeleton:
    """The model without weights; SourceError where it and the plan see different blocks,
    UnsupportedError where the plan has scales of keys and values that cannot be measured."""
    skeleton = Skeleton.open(checkpoint)
    if skeleton.count != plan.blocks.count:
        raise SourceError(
            f"{checkpoint.path}: the model class has {skeleton.count} blocks, the tensors "
            f"{plan.blocks.count} ({plan.blocks}); config.json and the tensors disagree"
        )
    if plan.cache and not skeleton.one_call:
        raise unmeasurable(next(iter(plan.cache.values())).attention)
    return skeleton


def _write_outside(run: Run) -> Outcome:
    """What belongs to no block: embeddings, final norm, and the head. Where what that reads is
    measured, the stream is behind the last block."""
    layers, notes = list[LayerReport](), list[str]()
    with run.progress.stage("export"):
        for planned in run.plan.by_block.get(None, ()):
            if planned.scheme is None and not isinstance(planned.action, Dropped):
                run.sink.dense(planned)
    for planned in quantized_outside(run.plan):
        seen = None
        if planned is run.head and run.sees_head:
            with run.progress.stage("calibrate"):
                seen = measured(run.skeleton, run.passage, planned.name, planned.shape[1])
        with run.progress.stage("quantize"):
            made = quantize_head(planned, seen, run.recipe, run.sink, run.passage)
        layers += made.layers
        notes += made.notes
    found = Outcome(layers, notes)
    resume.commit(run.journal, run.sink, None, found, None)
    return found
