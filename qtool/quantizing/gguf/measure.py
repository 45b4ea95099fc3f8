"""Measuring an importance matrix, and what is scaled or swept on the way."""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from qtool.calibrating.placed import Passage, ahead
from qtool.calibrating.sites import Tracer
from qtool.cuda.device import Device
from qtool.gguf.importance.imatrix import Importance
from qtool.gguf.importance.measured import Gathered, Squares, begin_with_bos
from qtool.gguf.source import GgufSource
from qtool.messages.progress import Progress
from qtool.quantizing.calibrate import SQUARE, measure_block
from qtool.quantizing.gguf import kept_importance
from qtool.recipe.recipe import Calibration as Settings
from qtool.runs import resume
from qtool.streaming.allocator import give_back
from qtool.streaming.hidden import OnDisk
from qtool.streaming.precision import settled
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.weights import Weights
from qtool.streaming.workers import Workers
from qtool.texts.calibration import calibration_tokens
from qtool.workspaces.workspace import Workspace

if TYPE_CHECKING:
    from qtool.quantizing.gguf.gptq.sweeping import Sweeping
    from qtool.quantizing.gguf.scaling import Scaling


def measure_importance(
    model: Weights,
    source: GgufSource,
    settings: Settings,
    threads: int,
    progress: Progress,
    space: Workspace | None = None,
    states_on_disk: bool = False,
    scaling: "Scaling | None" = None,
    sweeping: "Sweeping | None" = None,
    device: Device | None = None,
) -> Importance:
    """The importance matrix of the model, by the names that `source` has for it.

    space: where what is measured of a block is kept, from which a run that died goes on; and, with
    states_on_disk, hidden states instead of in memory. scaling: finds scales of each block, which
    is measured with them. sweeping: quantizes matrices of each block, which feeds those after it;
    without, all that is measured is of the unquantized model. device: where blocks are run.
    """
    with progress.stage("calibrate"), ExitStack() as stack:
        workers = stack.enter_context(Workers(threads))
        precision = settled(settings.precision, device, progress, space)
        calibration = calibration_tokens(settings, model.folder, progress)
        calibration = begin_with_bos(replace(calibration, precision=precision), source)
        skeleton = Skeleton.open(model)
        count = skeleton.count
        blocks: list[list[Squares]] = []
        if space is not None:
            space.agree({"calibration text": calibration.record()})
            blocks = kept_importance.take_up(space, count, scaling, sweeping)
        awaits_head = sweeping is not None and sweeping.awaits_head
        if len(blocks) < count or awaits_head:
            if sweeping is not None and sweeping.samples:
                assert space is not None
                sweeping.measure_gradients(
                    skeleton, calibration.tokens, space, threads, progress, device, precision
                )
            states = OnDisk(space.folder) if space is not None and states_on_disk else None
            stream = skeleton.embed(calibration.tokens, states=states)
            passage = Passage.of(stream, workers, device, precision)
            if sweeping is not None:
                sweeping.begin(skeleton, passage)
            if space is not None:
                kept_importance.take_up_hidden(space, blocks, stream, workers, sweeping)
            for kept in (scaling, sweeping):
                if kept is not None:
                    del kept.kept[len(blocks) :]
            resume.say(progress, len(blocks), count)
            tracer = Tracer(stacked=True)
            coming = stack.enter_context(ahead(skeleton, device))
            for index in progress.blocks(count, first=len(blocks)):
                give_back()
                measured = measure_block(
                    skeleton, coming.take(index), passage, tracer, SQUARE, scaling, sweeping
                )
                block = [Squares.of(site, stats) for site, stats in measured]
                if space is not None:
                    kept_importance.keep(
                        space,
                        index,
                        block,
                        stream,
                        workers,
                        goes_on=awaits_head or index + 1 < count,
                        scaling=scaling,
                        sweeping=sweeping,
                    )
                blocks.append(block)
            if sweeping is not None and sweeping.awaits_head:
                give_back()
                sweeping.sweep_head(skeleton, passage)
                if space is not None:
                    kept_importance.keep_head(space, sweeping)
    gathered = Gathered()
    for block in blocks:
        for squares in block:
            gathered.add(squares)
    return gathered.importance(source, calibration, None if device is None else device.name)
