"""One site of a block: the matrices that read one input, quantized by what was measured of it.

    Job -> GPTQ's factor of the Gram matrix, or none -> codes -> sink
        -> dequantized, back into the block: the next one is fed by what the artifact holds

A site's matrices are one job, since they share the factor; jobs of a block are independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import methods
from qtool.calibrating.input_scale import stored_scale
from qtool.calibrating.sites import BlockSites, Site
from qtool.calibrating.stats import MIN_EXPERT_TOKENS, SiteStats, is_rare
from qtool.calibrating.stream import LoadedBlock
from qtool.calibrating.weights import Weights
from qtool.methods import gptq, rtn
from qtool.plan.plan import Plan
from qtool.plan.planned import Planned
from qtool.plan.shared_scales import SharedScales
from qtool.recipe.recipe import Recipe
from qtool.runs import layer_errors
from qtool.runs.sink import Sink
from qtool.runs.summary import LayerReport
from qtool.scheme import Scheme

_REPORTED_ROWS = 256  # of each matrix, for its relative error


@dataclass(frozen=True)
class Job:
    """All that a site's quantization needs."""

    site: Site | None  # None: matrices that the forward pass never reads
    readers: tuple[Planned, ...]


def site_jobs(
    plan: Plan, index: int, found: BlockSites, sites: Sequence[Site], rest: bool
) -> list[Job]:
    """One job a site, the costliest first, so that threads end together.

    rest: with the matrices of the block that read none of its sites.
    """
    jobs: list[Job] = []
    for site in sites:
        readers = tuple(p for n in site.names if (p := plan.by_name[n]).scheme is not None)
        if readers:
            jobs.append(Job(site, readers))
    if rest:
        read = {name for site in found.sites for name in site.names}
        unread = (p for p in plan.by_block.get(index, ()) if p.name not in read)
        jobs += [Job(None, (planned,)) for planned in unread if planned.scheme is not None]

    def cost(job: Job) -> int:
        width = job.readers[0].shape[1]
        return -(width**3) - sum(planned.shape[0] * width**2 for planned in job.readers)

    return sorted(jobs, key=cost)


def quantize_site(
    job: Job,
    stats: dict[str, SiteStats],
    block: LoadedBlock,
    recipe: Recipe,
    checkpoint: Weights,
    shared: SharedScales,
    sink: Sink,
) -> tuple[list[LayerReport], list[str]]:
    """Quantize, write, and put the dequantized values back into the block.

    Takes its own of the stats, which are large, so that they are free when it ends.
    """
    reports: list[LayerReport] = []
    notes: list[str] = []
    seen = stats.pop(job.site.id, None) if job.site is not None else None
    kind = job.readers[0].name.removeprefix(block.prefix)
    scale = stored_scale(recipe, seen, job.readers[0].name)
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
        # None: a plan that was made without the model class, which does not know it.
        view = block.weights.get(planned.name)
        weight = checkpoint.float32(planned.name) if view is None else view.contiguous().numpy()
        with methods.named(planned.name):
            if given is not None:
                quant = gptq.quantize_with(weight, given, scheme, options)
            else:
                plain = rtn.Options(recipe.clips, shared.largest(planned, block.weights))
                quant = rtn.quantize(weight, seen, scheme, plain).quant
        sink.quantized(planned, quant, scale)
        dequantized = quant.dequantize()
        error = output_error(weight, dequantized, seen)
        coarse = layer_errors.coarseness(weight, dequantized, scheme)
        reports.append(LayerReport(planned.name, str(scheme), error, coarse))
        if view is not None:
            view.copy_(torch.from_numpy(dequantized))
    return reports, notes


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
