"""Methods that look at activations: one decoder block after another, each fed by quantized ones.

    for each block:  read it -> collect statistics of its inputs -> transform -> quantize each site
                     -> write -> run it with the quantized weights: the next block's input

So later blocks are fitted to the errors that earlier ones really make. Within a block the
statistics are those of its unquantized weights. With statistics from a file (`--stats`) nothing is
collected and only a probe passes through the blocks, to prove that transforms change nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import methods
from qtool.calibrating import cache, measure, outliers, ranges
from qtool.calibrating.allocator import give_back
from qtool.calibrating.calibration import Calibration, calibration_tokens
from qtool.calibrating.hidden import OnDisk, keep, take_up
from qtool.calibrating.sites import BlockSites, Site, Tracer
from qtool.calibrating.stats import MIN_EXPERT_TOKENS, SiteStats, StatsFile, collect, is_rare
from qtool.calibrating.stream import LoadedBlock, Skeleton, Stream, Workers
from qtool.checkpoint import Checkpoint
from qtool.errors import SourceError, UnsupportedError
from qtool.methods import gptq, rtn
from qtool.plan.estimate import gram_sum_bytes
from qtool.plan.plan import Plan
from qtool.plan.planned import Planned
from qtool.plan.shared_scales import SharedScales
from qtool.recipe.recipe import Recipe
from qtool.runs import layer_errors, resume
from qtool.runs.outcome import Outcome
from qtool.runs.progress import Progress
from qtool.runs.request import Request
from qtool.runs.sink import Sink
from qtool.runs.summary import ExpertReport, LayerReport, OutlierReport
from qtool.runs.workspace import Workspace
from qtool.scheme import Dropped, Scheme
from qtool.transforms import awq, smooth, smooth_attention
from qtool.transforms.proved import takes_part

_REPORTED_ROWS = 256  # of each matrix, for its relative error
# Those that are done block by block; a rotation is a view of the source.
_TRANSFORMS = {
    "smooth": smooth.apply,
    "smooth-attention": smooth_attention.apply,
    "awq": awq.apply,
}
NOT_ERROR_AWARE = "statistics from a file, used unchanged: not error-aware"


@dataclass(frozen=True)
class _Job:
    """All that a site's quantization needs."""

    site: Site | None  # None: matrices that the forward pass never reads
    readers: tuple[Planned, ...]


@dataclass(frozen=True)
class Given:
    """What flows through the blocks, and where statistics come from."""

    tokens: NDArray[np.int64]  # [samples, length]
    saved: StatsFile | None  # None: collected on the way
    record: dict[str, Any]  # of the calibration, for provenance


@dataclass(frozen=True)
class _Run:
    """What stays the same from block to block."""

    recipe: Recipe
    plan: Plan
    sink: Sink
    progress: Progress
    workers: Workers
    skeleton: Skeleton
    stream: Stream
    tracer: Tracer
    saved: StatsFile | None
    shared: SharedScales


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
    recipe, journal = request.recipe, space.journal
    with Workers(request.threads) as workers:
        with progress.stage("calibrate"):
            skeleton = skeleton or open_skeleton(checkpoint, plan)
            states = OnDisk(space.folder) if plan.memory.setting.states_on_disk else None
            stream = skeleton.embed(given.tokens, states=states)
        shared = SharedScales(plan, checkpoint)
        run = _Run(
            recipe, plan, sink, progress, workers, skeleton, stream, Tracer(), given.saved, shared
        )
        outside = resume.finished(journal, sink, None)
        done = _taken_up(run, space)
        resume.say(progress, len(done) + (outside is not None), skeleton.count + 1)
        if outside is None:
            _write_outside(plan, sink, progress)
            resume.commit(journal, sink, None, Outcome([]), None)
        for index in progress.blocks(skeleton.count, first=len(done)):
            outcome = _quantize_block(run, index)
            with progress.stage("export"):
                hidden = None
                if index + 1 < skeleton.count:
                    hidden = keep(space.folder, index + 1, stream, workers)
                resume.commit(journal, sink, index, outcome, hidden)
            done.append(outcome)
    position = {name: number for number, name in enumerate(plan.by_name)}
    layers = sorted(
        (layer for one in done for layer in one.layers), key=lambda layer: position[layer.name]
    )
    experts = [report for one in done for report in one.experts]
    notes = [] if given.saved is None else [NOT_ERROR_AWARE]
    notes += experts_note(experts) + merged([note for one in done for note in one.notes])
    found = [report for one in done for report in one.outliers]
    if recipe.reports_outliers:
        notes.append(outliers.note(found, recipe.llm_int8.threshold))
    return Outcome(layers, notes, given.record, experts, found)


def _taken_up(run: _Run, space: Workspace) -> list[Outcome]:
    """What an earlier run finished; the stream is then where that run stopped."""

    def found(index: int, kept: Any) -> bool:
        return take_up(space.folder, index, kept, run.stream, run.workers)

    with run.progress.stage("calibrate"):
        return resume.finished_blocks(space.journal, run.sink, run.skeleton.count, found)


def _quantize_block(run: _Run, index: int) -> Outcome:
    """Read, measure, transform, quantize and write one block; leave the stream before the next."""
    give_back()
    plan, stream, progress = run.plan, run.stream, run.progress
    notes: list[str] = []
    after: list[torch.Tensor] = []
    with progress.stage("calibrate"):
        block = run.skeleton.block(index)
        found = run.tracer.sites(block, stream)
        wanted = [s for s in found.sites if any(takes_part(plan, name) for name in s.names)]
        if run.saved is not None:
            # The probe is to see what the original computes, as the statistics did.
            calls = stream.calls[index]
            after = [block.run(h, call) for h, call in zip(stream.hidden, calls, strict=True)]
    counts: dict[str, int] = {}
    columns: list[OutlierReport] = []
    changed: frozenset[str] = frozenset()
    results: list[tuple[list[LayerReport], list[str]]] = []
    groups = _groups(wanted, run.recipe, plan.memory.setting.gram_bytes)
    for group in groups:
        with progress.stage("calibrate"):
            stats = _statistics(run, block, group)
        counts |= {site.id: stats[site.id].count for site in group}
        if run.recipe.reports_outliers:
            columns += outliers.found(group, stats, run.recipe.llm_int8.threshold)
        if group is groups[0]:
            with progress.stage("transform"):
                for name in run.recipe.transform_chain:
                    transform = _TRANSFORMS.get(name)
                    if transform is None:
                        continue
                    applied = transform(block, found, stats, plan, run.recipe, stream, run.workers)
                    stats, changed = applied.stats, changed | applied.changed
                    notes += applied.notes
        if run.recipe.measures_ranges:
            with progress.stage("calibrate"):
                again = collect(block, stream, group, {"histogram"}, run.workers)
                stats = {
                    key: replace(one, histogram=again[key].histogram) for key, one in stats.items()
                }
        with progress.stage("quantize"):
            give_back()
            jobs = _jobs(plan, index, found, group, rest=group is groups[-1])
            work = partial(_quantize_site, stats=stats, block=block, run=run)
            results += run.workers.map(work, jobs)
    give_back()
    _write_dense(plan, index, block, changed, run.sink, progress)
    with progress.stage("calibrate"):
        if run.saved is not None:
            for number, output in enumerate(after):
                stream.hidden[number] = output
        elif index in plan.cache:
            _write_cache_scales(run, block, advance=index + 1 < run.skeleton.count)
        elif index + 1 < run.skeleton.count:
            run.skeleton.advance(block, stream, run.workers)
    layers = [layer for reports, _ in results for layer in reports]
    notes += [note for _, said in results for note in said]
    return Outcome(layers, notes, None, _experts(block, wanted, counts), columns)


def _write_cache_scales(run: _Run, block: LoadedBlock, *, advance: bool) -> None:
    """Scales of what the block's attention keeps, now that its matrices are quantized."""
    kept, table = run.plan.cache[block.index], run.recipe.kv_cache
    assert table is not None
    found = cache.advance_and_measure(block, run.stream, kept, run.workers, advance=advance)
    run.sink.plain(cache.scales(found, kept, cache.REACH[table.type, table.bits]))


def _statistics(run: _Run, block: LoadedBlock, sites: Sequence[Site]) -> dict[str, SiteStats]:
    """What the recipe needs to know of some sites: from the file, or measured."""
    needs = recipe_needs(run.recipe)
    if run.saved is None:
        found = collect(block, run.stream, sites, needs, run.workers)
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


def _groups(sites: Sequence[Site], recipe: Recipe, gram_bytes: int) -> list[list[Site]]:
    """The sites that are measured and quantized together, the last ones of the block first.

    No input that is still to be measured then depends on a matrix that is already quantized: the
    statistics are the same for any grouping. Scales of AWQ and of smoothing are shared by sites,
    so all are one.
    """
    if recipe.shares_scales:
        return [list(sites)]
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


def recipe_needs(recipe: Recipe) -> frozenset[str]:
    """The statistics that a recipe's methods and transforms ask for."""
    needs = frozenset[str]()
    if "awq" in recipe.transform_chain:
        needs |= awq.NEEDS
    if "smooth" in recipe.transform_chain:
        needs |= smooth.needs(recipe)
    if recipe.rounding == "gptq":
        needs |= gptq.NEEDS
    if recipe.measures_inputs or recipe.reports_outliers:
        needs |= {"max_abs"}
    return needs


def given_to(recipe: Recipe, checkpoint: Checkpoint, stats: Path | None) -> Given:
    """The text, or the file of statistics; SourceError where it does not go with the model."""
    if stats is None:
        calibration: Calibration = calibration_tokens(recipe.calibration, checkpoint.folder)
        return Given(calibration.tokens, None, {**calibration.record(), "error_aware": True})
    if recipe.measures_cache:
        raise UnsupportedError(
            f"{stats}: a statistics file holds nothing of keys and values, for which recipe "
            f"{recipe.name} stores scales; run without --stats"
        )
    if recipe.measures_ranges:
        raise UnsupportedError(
            f"{stats}: a statistics file holds no histograms, which activations.observer of "
            f"recipe {recipe.name} needs; run without --stats, or with observer minmax"
        )
    saved = StatsFile.open(stats)
    record = measure.check_same_model(saved, checkpoint)
    return Given(measure.probe(checkpoint).tokens, saved, {**record, "error_aware": False})


def _write_outside(plan: Plan, sink: Sink, progress: Progress) -> None:
    """What belongs to no block: embeddings, final norm, head."""
    with progress.stage("export"):
        for planned in plan.by_block.get(None, ()):
            if not isinstance(planned.action, Dropped):
                sink.dense(planned)


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


def _experts(
    block: LoadedBlock, sites: Sequence[Site], tokens: Mapping[str, int]
) -> list[ExpertReport]:
    """Tokens that each routed expert of a block saw. tokens: by site id."""
    first = next((site for site in sites if site.expert is not None), None)
    if first is None:
        return []
    counts = {
        site.expert: tokens[site.id]
        for site in sites
        if site.expert is not None and site.matrix.parameter == first.matrix.parameter
    }
    where = block.prefix + first.matrix.parameter.rsplit(".", 1)[0]
    return [ExpertReport(where, [count for _, count in sorted(counts.items())])]


def experts_note(experts: list[ExpertReport]) -> list[str]:
    """One sentence on how evenly the calibration reached the experts."""
    if not experts:
        return []
    tokens = sorted(count for report in experts for count in report.tokens)
    rare = sum(count < MIN_EXPERT_TOKENS for count in tokens)
    said = (
        f"tokens per expert: {tokens[0]} to {tokens[-1]}, median {tokens[len(tokens) // 2]}, over "
        f"{len(tokens)} experts"
    )
    if rare:
        said += (
            f"; {rare} saw fewer than {MIN_EXPERT_TOKENS} and are rounded to nearest: more "
            "calibration samples would reach them"
        )
    return [said]


def _jobs(
    plan: Plan, index: int, found: BlockSites, sites: Sequence[Site], rest: bool
) -> list[_Job]:
    """One job a site, the costliest first, so that threads end together.

    rest: with the matrices of the block that read none of its sites.
    """
    jobs: list[_Job] = []
    for site in sites:
        readers = tuple(p for n in site.names if (p := plan.by_name[n]).scheme is not None)
        if readers:
            jobs.append(_Job(site, readers))
    if rest:
        read = {name for site in found.sites for name in site.names}
        unread = (p for p in plan.by_block.get(index, ()) if p.name not in read)
        jobs += [_Job(None, (planned,)) for planned in unread if planned.scheme is not None]

    def cost(job: _Job) -> int:
        width = job.readers[0].shape[1]
        return -(width**3) - sum(planned.shape[0] * width**2 for planned in job.readers)

    return sorted(jobs, key=cost)


def _quantize_site(
    job: _Job, stats: dict[str, SiteStats], block: LoadedBlock, run: _Run
) -> tuple[list[LayerReport], list[str]]:
    """Quantize, write, and put the dequantized values back into the block.

    Takes its own of the stats, which are large, so that they are free when it ends.
    """
    recipe = run.recipe
    reports: list[LayerReport] = []
    notes: list[str] = []
    seen = stats.pop(job.site.id, None) if job.site is not None else None
    kind = job.readers[0].name.removeprefix(block.prefix)
    input_scale = _input_scale(recipe, seen, job.readers[0].name)
    if job.site is None:
        notes.append(f"{kind} is never read in the forward pass; rounded to nearest")
    elif seen is not None and is_rare(job.site, seen):
        if job.site.expert is None:  # of the others experts_note says so
            notes.append(
                f"the input of {kind} was seen for fewer than {MIN_EXPERT_TOKENS} tokens; rounded "
                "to nearest"
            )
        seen = None
    elif recipe.rounding == "gptq" and (seen is None or seen.gram is None):
        notes.append(f"the input of {kind} was never seen; rounded to nearest")
    given = None
    options = gptq.Options.of(recipe.gptq)
    if recipe.rounding == "gptq" and seen is not None:
        with methods.named(f"the input of {job.readers[0].name}"):
            given = gptq.factor(seen.gram, options, seen.count) if seen.gram is not None else None
        if given is not None:
            notes += [f"the input of {job.readers[0].name}: {note}" for note in given.notes]
    for planned in job.readers:
        scheme = planned.action
        assert isinstance(scheme, Scheme)
        view = block.weights.get(planned.name)
        if view is None:  # a plan that was made without the model class, which does not know it
            weight = run.skeleton.checkpoint.float32(planned.name)
        else:
            weight = view.contiguous().numpy()
        with methods.named(planned.name):
            if given is not None:
                quant = gptq.quantize_with(weight, given, scheme, options)
            else:
                plain = rtn.Options(recipe.clips, run.shared.largest(planned, block.weights))
                quant = rtn.quantize(weight, seen, scheme, plain).quant
        run.sink.quantized(planned, quant, input_scale)
        dequantized = quant.dequantize()
        error = output_error(weight, dequantized, seen)
        coarse = layer_errors.coarseness(weight, dequantized, scheme)
        reports.append(LayerReport(planned.name, str(scheme), error, coarse))
        if view is not None:
            view.copy_(torch.from_numpy(dequantized))
    return reports, notes


def _input_scale(recipe: Recipe, seen: SiteStats | None, name: str) -> float | None:
    """The scale of a layer's input, where the recipe stores one: its range over the largest code.

    Rounded up to bfloat16, in which some engines keep it: the largest input stays in range.
    """
    wanted = recipe.activations
    if wanted is None or wanted.dynamic:
        return None
    if seen is None or seen.max_abs is None:
        raise SourceError(
            f"the input of {name} was never seen in calibration, so its scale cannot be told; "
            "calibrate with more samples, or choose --set activations.dynamic=true"
        )
    limit = float(seen.max_abs.max())
    if seen.histogram is not None and wanted.observer == "percentile":
        limit = min(limit, ranges.percentile(seen.histogram, wanted.percentile))
    elif seen.histogram is not None:

        def rounded(at: float, x: torch.Tensor) -> torch.Tensor:
            rounding = smooth.input_rounding(recipe, at)
            return x if rounding is None else rounding.apply(x)

        limit = ranges.least_squares(seen.histogram, limit, rounded)
    return cache.rounded_up(limit / wanted.reach)


def output_error(
    weight: NDArray[np.float32], dequantized: NDArray[np.float32], stats: SiteStats | None
) -> float:
    """sqrt(tr(E H E') / tr(W H W')) over evenly spaced rows; without H, of the norms alone."""
    rows = np.linspace(0, weight.shape[0] - 1, min(_REPORTED_ROWS, weight.shape[0])).astype(int)
    kept = torch.from_numpy(weight[rows])
    lost = kept - torch.from_numpy(dequantized[rows])
    if stats is not None and stats.gram is not None:
        gram = torch.from_numpy(stats.gram)
        signal = float(((kept @ gram) * kept).sum(dtype=torch.float64))
        noise = float(((lost @ gram) * lost).sum(dtype=torch.float64))
    else:
        signal = float((kept * kept).sum(dtype=torch.float64))
        noise = float((lost * lost).sum(dtype=torch.float64))
    return float(np.sqrt(max(noise, 0.0) / signal)) if signal > 0 else 0.0


def merged(notes: list[str]) -> list[str]:
    """Equal sentences once, with how often they came."""
    counts: dict[str, int] = {}
    for note in notes:
        counts[note] = counts.get(note, 0) + 1
    return [note if count == 1 else f"{note} ({count} times)" for note, count in counts.items()]
