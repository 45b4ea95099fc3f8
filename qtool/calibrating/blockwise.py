"""Methods that look at activations: one decoder block after another, each fed by quantized ones.

    for each block:  read it -> collect statistics of its inputs -> transform -> quantize each site
                     (-> tune) -> write -> run it with the quantized weights: the next block's input

So later blocks are fitted to the errors that earlier ones really make. Within a block the
statistics are those of its unquantized weights; with gptq.gptaq, which compares one input after
another with the original model's, those behind what is quantized already. With statistics from a
file (`--stats`) nothing is collected and only a probe passes through the blocks, to prove that
transforms change nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from qtool.calibrating import cache, outliers
from qtool.calibrating.allocator import give_back
from qtool.calibrating.experts import expert_reports, experts_note
from qtool.calibrating.given import Given, recipe_needs
from qtool.calibrating.head import measured, planned_head, quantize_head, quantized_outside
from qtool.calibrating.hidden import OnDisk, keep, take_up
from qtool.calibrating.originals import Originals, made_up_note, tuned_note
from qtool.calibrating.pairs import is_compared
from qtool.calibrating.placed import Ahead, Passage, ahead, placed_block
from qtool.calibrating.quantize_site import Job, quantize_site, site_jobs
from qtool.calibrating.sites import Site, Tracer
from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.stats import SiteStats
from qtool.calibrating.stats_file import StatsFile
from qtool.calibrating.stream import CPU, LoadedBlock
from qtool.calibrating.tuning import Tuning
from qtool.calibrating.workers import Workers
from qtool.checkpoint import Checkpoint
from qtool.errors import SourceError
from qtool.plan.plan import Plan
from qtool.plan.planned import Planned
from qtool.plan.shapes import gram_sum_bytes
from qtool.plan.shared_scales import SharedScales
from qtool.recipe.recipe import Recipe
from qtool.runs import resume
from qtool.runs.journal import Journal
from qtool.runs.outcome import Outcome
from qtool.runs.progress import Progress
from qtool.runs.request import Request
from qtool.runs.sink import Sink
from qtool.runs.summary import LayerReport, OutlierReport, TunedReport
from qtool.runs.workspace import Workspace
from qtool.scheme import Dropped
from qtool.transforms import awq, smooth, smooth_attention
from qtool.transforms.proved import Subject, takes_part

# Those that are done block by block; a rotation is a view of the source.
TRANSFORMS = {
    "smooth": smooth.apply,
    "smooth-attention": smooth_attention.apply,
    "awq": awq.apply,
}
Done = tuple[list[LayerReport], list[str]]  # of a site
NOT_ERROR_AWARE = "statistics from a file, used unchanged: not error-aware"


@dataclass(frozen=True)
class _Run:
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
    head: Planned | None  # where it is quantized

    def goes_on(self, index: int) -> bool:
        """Whether the states behind a block are needed."""
        return index + 1 < self.skeleton.count or self.sees_head

    @property
    def sees_head(self) -> bool:
        """Whether what the head reads is measured."""
        return self.head is not None and self.recipe.rounding == "gptq" and self.saved is None


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
            states = OnDisk(space.folder) if plan.memory.setting.states_on_disk else None
            stream = skeleton.embed(given.tokens, states=states)
        shared = SharedScales(plan, checkpoint)
        blocks = stack.enter_context(ahead(skeleton, device))
        passage = Passage.of(stream, workers, device)
        originals = None
        if recipe.follows_original:
            originals = Originals.of(skeleton, passage, space.folder)
        tuning = Tuning(originals, recipe.tune) if originals and recipe.tunes else None
        run = _Run(
            recipe, plan, journal, sink, progress, passage, skeleton, Tracer(), given.saved, shared,
            blocks, originals, tuning, planned_head(plan),
        )  # fmt: skip
        outside = resume.finished(journal, sink, None)
        done = _taken_up(run, space, outside is None)
        resume.say(progress, len(done) + (outside is not None), skeleton.count + 1)
        if outside is None and run.head is None:
            outside = _write_outside(run)
        for index in progress.blocks(skeleton.count, first=len(done)):
            outcome = _quantize_block(run, index)
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
    notes += experts_note(experts) + merged([note for one in done for note in one.notes])
    notes += made_up_note(recipe.makes_up)
    notes += tuned_note([report for one in done for report in one.tuned])
    found = [report for one in done for report in one.outliers]
    if recipe.reports_outliers:
        notes.append(outliers.note(found, recipe.llm_int8.threshold))
    return Outcome(layers, notes, given.record, experts, found)


def _taken_up(run: _Run, space: Workspace, more: bool) -> list[Outcome]:
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


def _quantize_block(run: _Run, index: int) -> Outcome:
    """Read, measure, transform, quantize and write one block; leave the stream before the next."""
    give_back()
    plan, progress = run.plan, run.progress
    stream, workers, device = run.passage.stream, run.passage.workers, run.passage.device
    notes: list[str] = []
    after: list[torch.Tensor] = []
    with progress.stage("calibrate"):
        block = run.blocks.take(index)
        found = run.tracer.sites(block, stream)
        wanted = [s for s in found.sites if any(takes_part(plan, name) for name in s.names)]
        if run.saved is not None:
            # The probe is to see what the original computes, as the statistics did.
            calls = stream.calls[index]
            after = [block.passed(h, call) for h, call in zip(stream.hidden, calls, strict=True)]
    if run.originals is not None and not run.recipe.makes_up:
        with progress.stage("calibrate"):
            run.originals.advance(block)
    before: LoadedBlock | None = None  # as it is here, but for transforms
    counts: dict[str, int] = {}
    columns: list[OutlierReport] = []
    changed: frozenset[str] = frozenset()
    results: list[tuple[list[LayerReport], list[str]]] = []
    room = plan.memory.setting.gram_bytes
    if device is not None:
        room = min(room, device.sums_bytes)
    # Scales of AWQ and of smoothing are shared by sites, so all are one group.
    groups = [wanted] if run.recipe.shares_scales else _groups(run.recipe, wanted, room)
    # The last one with inputs that are compared; those without come after it.
    last = [group for number, group in enumerate(groups) if not number or is_compared(group[0])][-1]
    for group in groups:
        with progress.stage("calibrate"):
            stats = _statistics(run, block, group)
        counts |= {site.id: stats[site.id].count for site in group}
        if run.recipe.reports_outliers:
            columns += outliers.found(group, stats, run.recipe.llm_int8.threshold)
        if group is groups[0] and run.recipe.transform_chain:
            with progress.stage("transform"):
                give_back()
                subject = Subject(block, found, plan, run.recipe, stream, workers, device)
                for name in run.recipe.transform_chain:
                    transform = TRANSFORMS.get(name)
                    if transform is None:
                        continue
                    applied = transform(subject, stats)
                    stats, changed = applied.stats, changed | applied.changed
                    notes += applied.notes
        if run.recipe.makes_up and group is groups[0]:
            before = placed_block(block, CPU)
        if run.recipe.measures_ranges:
            with progress.stage("calibrate"):
                again = run.passage.collect(block, group, {"histogram"})
                stats = {
                    key: replace(one, histogram=again[key].histogram) for key, one in stats.items()
                }
        with progress.stage("quantize"):
            give_back()
            jobs = site_jobs(plan, index, found, group, rest=group is groups[-1])
            work = partial(
                quantize_site,
                stats=stats,
                block=block,
                recipe=run.recipe,
                checkpoint=run.skeleton.checkpoint,
                shared=run.shared,
                write=run.sink.quantized if run.tuning is None else run.tuning.hold,
                workers=workers,
                device=device,
            )
            if run.originals is not None and before is not None:
                results += _making_up(run, block, before, group, jobs, stats, work)
                jobs = [job for job in jobs if not is_compared(job.site)]
                if group is last:
                    with progress.stage("calibrate"):
                        run.originals.advance(before)
                    before = None
            results += workers.map(work, jobs)
    give_back()
    tuned: list[TunedReport] = []
    if run.tuning is not None:
        with progress.stage("quantize"):
            tuned = run.tuning.finish(block, run.sink)
    _write_dense(plan, index, block, changed, run.sink, progress)
    with progress.stage("calibrate"):
        if run.saved is not None:
            for number, output in enumerate(after):
                stream.hidden[number] = output
        elif index in plan.cache:
            _write_cache_scales(run, block, advance=run.goes_on(index))
        elif run.goes_on(index):
            with run.passage.placed(block) as (there, passing, turn):
                run.skeleton.advance(there, passing, turn)
            del there
    layers = [layer for reports, _ in results for layer in reports]
    notes += [note for _, said in results for note in said]
    experts = expert_reports(block, wanted, counts)
    return Outcome(layers, notes, None, experts, columns, tuned)


def _groups(recipe: Recipe, sites: Sequence[Site], room: int) -> list[list[Site]]:
    """groups_of(); where matrices make up for what their inputs lost, these one after another, so
    that each sees what those before it have become."""
    if not recipe.makes_up:
        return groups_of(sites, room)
    rest = [site for site in sites if not is_compared(site)]
    alone = [[site] for site in sites if is_compared(site)]
    return [*alone, *(groups_of(rest, room) if rest else [])] or [[]]


def _making_up(
    run: _Run,
    block: LoadedBlock,
    before: LoadedBlock,
    sites: Sequence[Site],
    jobs: Sequence[Job],
    stats: dict[str, SiteStats],
    work: Callable[[Job], Done],
) -> list[Done]:
    """Quantize the jobs of sites, which are in the order of the forward pass, each once its
    matrices make up for what its input has lost."""
    assert run.originals is not None
    done = []
    for site in filter(is_compared, sites):  # their Gram matrices are measured again, one by one
        stats[site.id] = replace(stats[site.id], gram=None, there=None)
    by_site = {job.site.id: job for job in jobs if job.site is not None and is_compared(job.site)}
    for site in sites:
        if (job := by_site.get(site.id)) is None:
            continue
        names = {planned.name for planned in job.readers}
        made = run.originals.make_up(block, before, site, names, run.recipe.makes_up)
        stats[site.id] = made.added_to(stats[site.id])
        reports, notes = work(job)
        done.append((reports, [*made.notes, *notes]))
    return done


def _write_cache_scales(run: _Run, block: LoadedBlock, *, advance: bool) -> None:
    """Scales of what the block's attention keeps, now that its matrices are quantized."""
    kept, table = run.plan.cache[block.index], run.recipe.kv_cache
    assert table is not None
    with run.passage.placed(block) as (there, stream, workers):
        found = cache.advance_and_measure(there, stream, kept, workers, advance=advance)
    run.sink.plain(cache.scales(found, kept, cache.REACH[table.type, table.bits]))


def _statistics(run: _Run, block: LoadedBlock, sites: Sequence[Site]) -> dict[str, SiteStats]:
    """What the recipe needs to know of some sites: from the file, or measured."""
    needs = recipe_needs(run.recipe)
    if run.recipe.makes_up and not run.recipe.shares_scales and all(map(is_compared, sites)):
        needs -= {"gram"}  # it comes with what the original's input is compared by
        if not needs:
            return {site.id: SiteStats(0) for site in sites}
    if run.saved is None:
        found = run.passage.collect(block, sites, needs)
        for site in sites:
            _check_finite(site, found[site.id])
        return found
    return {site.id: run.saved.read(site.id, needs, site.in_features) for site in sites}


def _check_finite(site: Site, stats: SiteStats) -> None:
    """SourceError where what came in is infinite or undefined: every method would make garbage."""
    diagonal = None if stats.gram is None else np.diagonal(stats.gram)
    for values in (diagonal, stats.mean_abs, stats.max_abs):
        if values is not None and not np.isfinite(values).all():
            raise SourceError(
                f"the input of {site.names[0]}: calibration met infinite or undefined activations, "
                "so weights of this block or of one before it are damaged or too large; see their "
                "range with `qtool inspect MODEL --tensor NAME`"
            )


def groups_of(sites: Sequence[Site], gram_bytes: int) -> list[list[Site]]:
    """The sites that are measured and quantized together, the last ones of the block first.

    No input that is still to be measured then depends on a matrix that is already quantized: the
    statistics are the same for any grouping.
    """
    groups: list[list[Site]] = []
    room = 0
    for site in reversed(sites):
        size = gram_sum_bytes(site.in_features)
        if not groups or size > room:
            groups.append([])
            room = gram_bytes
        groups[-1].insert(0, site)
        room -= size
    return groups or [[]]


def open_skeleton(checkpoint: Checkpoint, plan: Plan) -> Skeleton:
    """The model without weights; SourceError where it and the plan see different blocks."""
    skeleton = Skeleton.open(checkpoint)
    if skeleton.count != plan.blocks.count:
        raise SourceError(
            f"{checkpoint.path}: the model class has {skeleton.count} blocks, the tensors "
            f"{plan.blocks.count} ({plan.blocks}); config.json and the tensors disagree"
        )
    return skeleton


def _write_outside(run: _Run) -> Outcome:
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
                seen = measured(run.skeleton, run.passage, planned)
        with run.progress.stage("quantize"):
            made = quantize_head(planned, seen, run.recipe, run.sink, run.passage)
        layers += made.layers
        notes += made.notes
    found = Outcome(layers, notes)
    resume.commit(run.journal, run.sink, None, found, None)
    return found


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


def merged(notes: list[str]) -> list[str]:
    """Equal sentences once, with how often they came."""
    counts: dict[str, int] = {}
    for note in notes:
        counts[note] = counts.get(note, 0) + 1
    return [note if count == 1 else f"{note} ({count} times)" for note, count in counts.items()]
