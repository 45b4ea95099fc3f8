"""One decoder block: measured, transformed, quantized site by site, tuned, written, and run for
what the next block reads. Which blocks, and what is outside: qtool.blockwise.run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from qtool.blockwise.experts import expert_reports
from qtool.blockwise.originals import Originals
from qtool.blockwise.quantize_site import Job, quantize_site, site_jobs
from qtool.blockwise.row_feedback import Feedback, Rows
from qtool.blockwise.siblings import Siblings
from qtool.blockwise.site_statistics import Statistics, Stats
from qtool.blockwise.tuning import Tuning
from qtool.calibrating import cache, outliers
from qtool.calibrating.groups import groups_for
from qtool.calibrating.guidance import Guidance
from qtool.calibrating.pairs import is_compared
from qtool.calibrating.placed import Ahead, Passage, placed_block
from qtool.calibrating.sites import BlockSites, Site, Tracer
from qtool.calibrating.stats import Weights
from qtool.calibrating.stats_file import StatsFile
from qtool.messages.progress import Progress
from qtool.messages.summary import LayerReport, OutlierReport, TunedReport
from qtool.planned import Planned
from qtool.planning.plan import Plan
from qtool.planning.shared_scales import SharedScales
from qtool.provenance.outcome import Outcome
from qtool.recipe.recipe import Recipe
from qtool.runs.sink import Sink
from qtool.scheme import Dropped
from qtool.streaming.allocator import give_back
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import CPU, LoadedBlock
from qtool.transforms.chain import apply_in_turn
from qtool.transforms.proved import Applied, Subject, takes_part
from qtool.workspaces.journal import Journal

Done = tuple[list[LayerReport], list[str]]  # of a site: reports, notes


@dataclass(frozen=True)
class Run:
    """What stays the same from block to block."""

    recipe: Recipe
    plan: Plan
    journal: Journal
    sink: Sink
    progress: Progress
    passage: Passage
    skeleton: Skeleton
    tracer: Tracer
    saved: StatsFile | None
    shared: SharedScales
    blocks: Ahead
    originals: Originals | None  # where blocks are to give back what they gave
    tuning: Tuning | None
    guidance: Guidance | None  # where tokens of keys and values count by what is read of them
    feedback: Feedback | None  # where rows compensate for each other
    head: Planned | None  # where it is quantized

    def goes_on(self, index: int) -> bool:
        """Whether the states behind a block are needed."""
        return index + 1 < self.skeleton.count or self.sees_head

    @property
    def sees_head(self) -> bool:
        """Whether what the head reads is measured."""
        return self.head is not None and self.recipe.rounding == "gptq" and self.saved is None

    @property
    def gram_bytes(self) -> int:
        """What sums of squares of one group of sites may take, in bytes."""
        room, device = self.plan.memory.setting.gram_bytes, self.passage.device
        return room if device is None else min(room, device.sums_bytes)


def quantize_block(run: Run, index: int) -> Outcome:
    """Read, measure, transform, quantize and write one block; leave the stream before the next."""
    give_back()
    recipe, progress, stream = run.recipe, run.progress, run.passage.stream
    with progress.stage("calibrate"):
        block = run.blocks.take(index)
        found = run.tracer.sites(block, stream)
        # The probe is to see what the original computes, as the statistics of a file did.
        after = [] if run.saved is None else _outputs(run, block)
        if run.originals is not None and not recipe.compensates:
            run.originals.advance(block)
        weights: Weights = {}
        if run.guidance is not None:
            weights = run.guidance.weights(block, run.passage, found)
    wanted = [s for s in found.sites if any(takes_part(run.plan, name) for name in s.names)]
    groups = groups_for(recipe, wanted, run.gram_bytes)
    # The last one with inputs that are compared; those without come after it.
    last = [group for number, group in enumerate(groups) if not number or is_compared(group[0])][-1]
    before: LoadedBlock | None = None  # as it is once it is transformed, but not rounded
    counts: dict[str, int] = {}
    columns: list[OutlierReport] = []
    changed: frozenset[str] = frozenset()
    notes = [] if run.guidance is None else run.guidance.said(index, bool(weights))
    rows: Rows = {}  # of all matrices at once: they are of the block before any of it is rounded
    results: list[Done] = []
    siblings = Siblings(wanted)
    statistics = Statistics(recipe, run.passage, run.saved)
    for group in groups:
        with progress.stage("calibrate"):
            stats = statistics.of(block, group, weights)
        counts |= {site.id: stats[site.id].count for site in group}
        if recipe.reports_outliers:
            columns += outliers.found(group, stats, recipe.llm_int8.threshold)
        if group is groups[0]:
            siblings.transforming(stats)
            applied = _transformed(run, block, found, stats)
            stats, changed = applied.stats, applied.changed
            notes += applied.notes
            del applied  # Gram matrices of a group go with it
            before = placed_block(block, CPU) if recipe.compensates else None
            if run.feedback is not None:
                with progress.stage("calibrate"):
                    swept = {p.name for p in run.plan.by_block[index] if p.scheme is not None}
                    rows = run.feedback.of(block, run.passage, found, swept)
                    give_back()
                notes += run.feedback.said(index, bool(rows))
        with progress.stage("calibrate"):
            if recipe.measures_ranges:
                stats = statistics.with_histograms(block, group, stats)
            if recipe.measures_inputs:
                unread = found.unread if group is groups[-1] else ()
                stats = siblings.filled(stats, unread, partial(statistics.ranges, block))
        with progress.stage("quantize"):
            give_back()
            jobs = site_jobs(run.plan, index, found, group, rest=group is groups[-1])
            work = _work(run, block, stats, rows)
            if run.originals is not None and before is not None:
                results += _compensating(
                    run, run.originals, block, before, group, jobs, stats, weights, work
                )
                jobs = [job for job in jobs if not is_compared(job.site)]
                if group is last:
                    with progress.stage("calibrate"):
                        run.originals.advance(before)
                    before = None
            results += run.passage.workers.map(work, jobs)
    give_back()
    tuned: list[TunedReport] = []
    if run.tuning is not None:
        with progress.stage("quantize"):
            tuned = run.tuning.finish(block, run.sink)
    _write_dense(run.plan, index, block, changed, run.sink, progress)
    with progress.stage("calibrate"):
        _advance(run, block, after)
    layers = [layer for reports, _ in results for layer in reports]
    notes += [note for _, said in results for note in said]
    return Outcome(layers, notes, None, expert_reports(block, wanted, counts), columns, tuned)


def _outputs(run: Run, block: LoadedBlock) -> list[torch.Tensor]:
    """What the block makes of each micro-batch, as it is."""
    stream = run.passage.stream
    pairs = zip(stream.hidden, stream.calls[block.index], strict=True)
    return [block.passed(hidden, call) for hidden, call in pairs]


def _transformed(run: Run, block: LoadedBlock, found: BlockSites, stats: Stats) -> Applied:
    """The recipe's transforms, put into the block's weights."""
    if not run.recipe.transform_chain:
        return Applied(stats, frozenset())
    with run.progress.stage("transform"):
        give_back()
        passage = run.passage
        subject = Subject(
            block, found, run.plan, run.recipe, passage.stream, passage.workers, passage.device
        )
        return apply_in_turn(run.recipe.transform_chain, subject, stats)


def _work(run: Run, block: LoadedBlock, stats: Stats, rows: Rows) -> Callable[[Job], Done]:
    """Quantizes what reads a site, puts it into the block, and writes it or holds it for tuning."""
    return partial(
        quantize_site,
        stats=stats,
        block=block,
        recipe=run.recipe,
        checkpoint=run.skeleton.checkpoint,
        shared=run.shared,
        write=run.sink.quantized if run.tuning is None else run.tuning.hold,
        workers=run.passage.workers,
        device=run.passage.device,
        rows=rows,
    )


def _compensating(
    run: Run,
    originals: Originals,
    block: LoadedBlock,
    before: LoadedBlock,
    sites: Sequence[Site],
    jobs: Sequence[Job],
    stats: Stats,
    weights: Weights,
    work: Callable[[Job], Done],
) -> list[Done]:
    """Quantize the jobs of sites that are compared, in the order of the forward pass, each once its
    matrices compensate for what its input has lost."""
    compared = list(filter(is_compared, sites))
    for site in compared:  # their Gram matrices are measured again, one by one
        stats[site.id] = replace(stats[site.id], gram=None, there=None)
    by_site = {job.site.id: job for job in jobs if job.site is not None}
    done = []
    for site in compared:
        if (job := by_site.get(site.id)) is None:
            continue
        names = {planned.name for planned in job.readers}
        own = weights.get(site.id)
        made = originals.compensate(block, before, site, names, run.recipe.compensates, own)
        stats[site.id] = made.added_to(stats[site.id])
        reports, notes = work(job)
        done.append((reports, [*made.notes, *notes]))
    return done


def _write_dense(
    plan: Plan,
    index: int,
    block: LoadedBlock,
    changed: frozenset[str],
    sink: Sink,
    progress: Progress,
) -> None:
    """The block's dense tensors (norms, biases, routers), with what folds made of them."""
    with progress.stage("export"):
        for planned in plan.by_block.get(index, ()):
            if planned.scheme is None and not isinstance(planned.action, Dropped):
                new = planned.name in changed
                sink.dense(planned, block.weights[planned.name].numpy() if new else None)


def _advance(run: Run, block: LoadedBlock, after: Sequence[torch.Tensor]) -> None:
    """The stream goes behind the block: to what the original made, where that was asked."""
    stream = run.passage.stream
    if run.saved is not None:
        for number, output in enumerate(after):
            stream.hidden[number] = output
    elif block.index in run.plan.cache:
        _write_cache_scales(run, block, advance=run.goes_on(block.index))
    elif run.goes_on(block.index):
        with run.passage.placed(block) as (there, passing, turn):
            run.skeleton.advance(there, passing, turn)


def _write_cache_scales(run: Run, block: LoadedBlock, *, advance: bool) -> None:
    """Scales of what the block's attention keeps, now that its matrices are quantized."""
    kept, table = run.plan.cache[block.index], run.recipe.kv_cache
    assert table is not None
    with run.passage.placed(block) as (there, stream, workers):
        found = cache.advance_and_measure(there, stream, kept, workers, advance=advance)
    run.sink.plain(cache.scales(found, kept, cache.REACH[table.type, table.bits]))
