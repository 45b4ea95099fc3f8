"""Quantizing without a forward pass: every tensor stands alone, and threads work on several."""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from qtool import methods
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.dequantize import dequantize
from qtool.messages.progress import Progress
from qtool.messages.summary import WEIGHTS, LayerReport
from qtool.methods import rtn
from qtool.planned import Planned
from qtool.planning.plan import Plan
from qtool.planning.shapes import CACHED_AT_ONCE, ROWS_AT_ONCE
from qtool.planning.shared_scales import SharedScales
from qtool.provenance.outcome import Outcome
from qtool.runs import layer_errors, resume
from qtool.runs.by_rows import nearest, quantize_rows, side_by_side
from qtool.runs.request import Request
from qtool.runs.sink import Sink, check_values
from qtool.scheme import Dropped, Scheme
from qtool.streaming.weights import is_view, rows_of
from qtool.workspaces.journal import Journal


def quantize_each(
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
        error = frobenius_error(weight, found)
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


def frobenius_error(weight: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Norm of W - Q over the norm of W; 0 for a zero matrix. found: Q, written over.

    numpy's own sums: those of BLAS depend on its threads, and the number goes into the card.
    """
    size = float((weight * weight).sum(dtype=np.float64))
    lost = np.subtract(weight, found, out=found)
    lost *= lost
    return math.sqrt(float(lost.sum(dtype=np.float64)) / size) if size else 0.0
