"""Methods that look at activations: one decoder block after another, each fed by quantized ones.

    for each block:  read it -> collect statistics of its inputs -> transform -> quantize each site
                     -> write -> run it with the quantized weights: the next block's input

So later blocks are fitted to the errors that earlier ones really make. Within a block the
statistics are those of its unquantized weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import methods
from qtool.calibration import Calibration, calibration_tokens
from qtool.checkpoint import Checkpoint
from qtool.errors import SourceError
from qtool.methods import gptq, rtn
from qtool.outcome import Outcome
from qtool.plan import Plan, Planned
from qtool.progress import Progress
from qtool.recipe import Recipe
from qtool.scheme import Dropped, GroupQuant, Scheme
from qtool.sink import Sink
from qtool.sites import BlockSites, Site, Tracer
from qtool.stats import SiteStats, collect
from qtool.stream import LoadedBlock, Skeleton, Workers
from qtool.summary import LayerReport


if TYPE_CHECKING:
    from qtool.pipeline import Request

# An expert that saw fewer tokens is rounded to nearest: its statistics would be chance.
MIN_EXPERT_TOKENS = 64
_REPORTED_ROWS = 256  # of each matrix, for its relative error


@dataclass(frozen=True)
class _Job:
    """All that a site's quantization needs."""

    site: Site | None  # None: matrices that the forward pass never reads
    readers: tuple[Planned, ...]
    stats: SiteStats | None


def quantize_blocks(
    request: "Request", plan: Plan, checkpoint: Checkpoint, sink: Sink, progress: Progress
) -> Outcome:
    """Quantize every block in turn."""
    recipe = request.recipe
    needs = recipe_needs(recipe)
    layers: list[LayerReport] = []
    notes: list[str] = []
    with Workers(request.threads) as workers:
        with progress.stage("calibrate"):
            skeleton = Skeleton.open(checkpoint)
            if skeleton.count != plan.blocks.count:
                raise SourceError(
                    f"{checkpoint.path}: the model class has {skeleton.count} blocks, the plan "
                    f"{plan.blocks.count} ({plan.blocks}); config.json and the tensors disagree"
                )
            calibration = calibration_tokens(recipe.calibration, checkpoint.folder)
            stream = skeleton.embed(calibration.tokens)
        with progress.stage("export"):
            for planned in plan.by_block.get(None, ()):
                if not isinstance(planned.action, Dropped):
                    sink.dense(planned)
        tracer = Tracer()
        for index in progress.blocks(skeleton.count):
            with progress.stage("calibrate"):
                block = skeleton.block(index)
                found = tracer.sites(block, stream)
                wanted = [site for site in found.sites if _quantized(plan, site)]
                stats = collect(block, stream, wanted, needs, workers)
            changed: frozenset[str] = frozenset()
            if "awq" in recipe.transform_chain:
                with progress.stage("transform"):
                    result = awq.apply(block, found, stats, plan, recipe, stream, workers)
                    stats, changed = result.stats, result.changed
                    notes += result.notes
            with progress.stage("quantize"):
                jobs = _jobs(plan, index, found, stats)
                del stats
                results = workers.map(lambda job: _quantize_site(job, block, recipe, sink), jobs)
            for reports, said in results:
                layers += reports
                notes += said
            with progress.stage("export"):
                for planned in plan.by_block.get(index, ()):
                    if planned.scheme is None and not isinstance(planned.action, Dropped):
                        new = planned.name in changed
                        sink.dense(planned, block.weights[planned.name].numpy() if new else None)
            if index + 1 < skeleton.count:
                with progress.stage("calibrate"):
                    skeleton.advance(block, stream, workers)
            del block
    layers.sort(key=lambda report: list(plan.by_name).index(report.name))
    return Outcome(layers, _merged(notes), calibration.record())


def recipe_needs(recipe: Recipe) -> frozenset[str]:
    """The statistics that a recipe's methods and transforms ask for."""
    needs = frozenset[str]()
    if "awq" in recipe.transform_chain:
        from qtool.transforms import awq

        needs |= awq.NEEDS
    if recipe.rounding == "gptq":
        needs |= gptq.NEEDS
    return needs


def _quantized(plan: Plan, site: Site) -> bool:
    return any(plan.by_name[name].scheme is not None for name in site.names)


def _jobs(
    plan: Plan, index: int, found: BlockSites, stats: Mapping[str, SiteStats]
) -> list[_Job]:
    """One job a site, the costliest first, so that threads end together."""
    jobs: list[_Job] = []
    done: set[str] = set()
    for site in found.sites:
        readers = tuple(p for n in site.names if (p := plan.by_name[n]).scheme is not None)
        done.update(planned.name for planned in readers)
        if readers:
            jobs.append(_Job(site, readers, stats.get(site.id)))
    rest = (p for p in plan.by_block.get(index, ()) if p.scheme is not None)
    jobs += [_Job(None, (planned,), None) for planned in rest if planned.name not in done]

    def cost(job: _Job) -> int:
        width = job.readers[0].shape[1]
        return -(width**3) - sum(planned.shape[0] * width**2 for planned in job.readers)

    return sorted(jobs, key=cost)


def _quantize_site(
    job: _Job, block: LoadedBlock, recipe: Recipe, sink: Sink
) -> tuple[list[LayerReport], list[str]]:
    """Quantize, write, and put the dequantized values back into the block."""
    reports: list[LayerReport] = []
    notes: list[str] = []
    stats = job.stats
    if recipe.rounding == "gptq":
        reason = _no_gptq(job)
        if reason is not None:
            notes.append(f"rounded to nearest, not GPTQ: {reason}")
            stats = None
    given = None
    if recipe.rounding == "gptq" and stats is not None and stats.gram is not None:
        options = gptq_options(recipe)
        with methods.named(job.readers[0].name):
            given = gptq.factor(stats.gram, options)
        notes += [f"{job.readers[0].name}: {note}" for note in given.notes]
    for planned in job.readers:
        scheme = planned.action
        assert isinstance(scheme, Scheme)
        view = block.weights[planned.name]
        weight = view.numpy() if view.is_contiguous() else view.contiguous().numpy()
        with methods.named(planned.name):
            if given is not None:
                quant = gptq.quantize_with(weight, given, scheme, options)
            else:
                quant = rtn.quantize(weight, stats, scheme, rtn.Options(clip=recipe.clips)).quant
        sink.quantized(planned, quant)
        dequantized = quant.dequantize()
        error = output_error(weight, dequantized, job.stats)
        reports.append(LayerReport(planned.name, str(scheme), error))
        view.copy_(torch.from_numpy(dequantized))
    return reports, notes


def gptq_options(recipe: Recipe) -> gptq.Options:
    """The part of the recipe's `gptq:` table that the method reads."""
    return gptq.Options(**{f.name: getattr(recipe.gptq, f.name) for f in fields(gptq.Options)})


def _no_gptq(job: _Job) -> str | None:
    """Why a site's statistics cannot carry GPTQ, or None."""
    if job.site is None or job.stats is None:
        return f"{job.readers[0].name} is never read in the forward pass"
    if job.stats.count < MIN_EXPERT_TOKENS and job.site.expert is not None:
        experts = job.site.matrix.parameter.rsplit(".", 1)[0]
        return f"an expert of {experts} saw fewer than {MIN_EXPERT_TOKENS} calibration tokens"
    return None


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


def _merged(notes: list[str]) -> list[str]:
    """Equal sentences once, with how often they came."""
    counts: dict[str, int] = {}
    for note in notes:
        counts[note] = counts.get(note, 0) + 1
    return [note if count == 1 else f"{note} ({count} times)" for note, count in counts.items()]
