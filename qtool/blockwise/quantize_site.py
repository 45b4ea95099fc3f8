"""One site of a block: the matrices that read one input, quantized by what was measured of it.

    Job -> GPTQ's factor of the Gram matrix, or none -> codes -> written, or kept to be tuned
        -> dequantized, back into the block: the next one is fed by what the artifact holds

A site's matrices are one job, since they share the factor; jobs of a block are independent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import methods
from qtool.blockwise.input_scale import stored_scale
from qtool.blockwise.output_errors import Part, output_errors, part
from qtool.blockwise.row_feedback import Rows
from qtool.blockwise.row_rounding import factored, round_rows
from qtool.calibrating.sites import BlockSites, Site
from qtool.calibrating.stats import MIN_EXPERT_TOKENS, SiteStats, gram_on, is_rare
from qtool.cuda.device import Device
from qtool.dequantize import dequantize
from qtool.errors import UnsupportedError
from qtool.gradients.block_gradients import advised
from qtool.messages.summary import OUTPUTS, WEIGHTS, LayerReport
from qtool.methods import gptq, rtn
from qtool.methods.tiles import Spread, in_turn
from qtool.planned import Planned
from qtool.planning.plan import Plan
from qtool.planning.shared_scales import SharedScales
from qtool.recipe.recipe import Recipe
from qtool.runs import layer_errors
from qtool.scheme import GroupQuant, Scheme, joined
from qtool.streaming.stream import LoadedBlock
from qtool.streaming.weights import Weights
from qtool.streaming.workers import Workers

Floats = NDArray[np.float32]
Write = Callable[[Planned, GroupQuant, float | None], None]  # a matrix, and its input's scale


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
    write: Write,
    workers: Workers,
    device: Device | None = None,
    rows: Rows | None = None,
) -> tuple[list[LayerReport], list[str]]:
    """Quantize, write, and put the dequantized values back into the block.

    Takes its own of the stats, which are large, so that they are free when it ends. workers: who
    call this, and have threads for a large matrix when those of others are done. device: that
    factors, sweeps and rounds; packing and writing stay here. rows: by which those of some matrices
    compensate for each other, used up.
    """
    notes: list[str] = []
    seen = stats.pop(job.readers[0].name if job.site is None else job.site.id, None)
    kind = job.readers[0].name.removeprefix(block.prefix)
    scale = stored_scale(recipe, seen, job.readers[0].name)
    if job.site is None:
        notes.append(f"no linear layer was seen to read {kind}; rounded to nearest")
        seen = None
    elif seen is not None and is_rare(job.site, seen):
        if job.site.expert is None:  # of the others experts_note says so
            notes.append(
                f"the input of {kind} was seen for fewer than {MIN_EXPERT_TOKENS} tokens; rounded "
                "to nearest"
            )
        seen = None
    elif recipe.rounding == "gptq" and (seen is None or seen.gram is None):
        notes.append(f"the input of {kind} was never seen; rounded to nearest")
    given: gptq.Factor | None = None
    there: dict[str, GroupQuant] = {}
    options = gptq.Options.of(recipe.gptq)
    weight_of, rounding = partial(_weight, block, checkpoint), rtn.rounding_on(device)
    largest = partial(_largest, shared, block)
    if recipe.rounding == "gptq" and seen is not None and seen.gram is not None:
        where = f"the input of {job.readers[0].name}"
        with methods.named(where):
            if device is None:
                given = gptq.factor(seen.gram, options, seen.count, spread=workers.spread)
                more = given.notes
            else:
                there, more = _swept(
                    device, job.readers, seen, weight_of, options, rows or {}, largest
                )
        notes += [f"{where}: {note}" for note in more]
    coarse: list[float | None] = []
    parts: list[Part] = []
    for planned in job.readers:
        scheme = _scheme(planned)
        weight = weight_of(planned.name)
        with methods.named(planned.name):
            if given is not None:
                top = largest(planned, weight)
                sweep = partial(_sweep, given, scheme, options, workers, top)
                quant = _rounded(weight, planned.name, rows or {}, sweep, workers.spread, None)
            elif planned.name in there:
                quant = there.pop(planned.name)
            else:
                # What GPTQ leaves out is rounded as its own grids are found.
                searched = recipe.rounding == "gptq" and recipe.gptq.mse and scheme.is_float
                plain = rtn.Options(
                    recipe.clips or searched, shared.largest(planned, block.weights)
                )
                quant = rtn.quantize(weight, seen, scheme, plain, 1, rounding).quant
        write(planned, quant, scale)
        dequantized = dequantize(quant)
        parts.append(part(weight, dequantized))
        coarse.append(layer_errors.coarseness(weight, dequantized, scheme))
        if planned.name in block.weights:
            block.weights[planned.name].copy_(torch.from_numpy(dequantized))
        del quant, dequantized  # before the next one takes as much
    of = WEIGHTS if seen is None or seen.gram is None else OUTPUTS
    reports = [
        LayerReport(planned.name, str(planned.action), error, of, one)
        for planned, error, one in zip(
            job.readers, output_errors(parts, seen, device), coarse, strict=True
        )
    ]
    return reports, notes


def _sweep(
    given: gptq.Factor,
    scheme: Scheme,
    options: gptq.Options,
    workers: Workers,
    largest: float | None,
    weight: Floats,
) -> GroupQuant:
    return gptq.quantize_with(weight, given, scheme, options, workers.share(), largest)


def _largest(
    shared: SharedScales, block: LoadedBlock, planned: Planned, weight: Floats
) -> float | None:
    """max|w| of all that shares a scale with a whole matrix, of small floats; rows that compensate
    for others share it, too."""
    found, scheme = shared.largest(planned, block.weights), _scheme(planned)
    if found is None and scheme.is_float and (scheme.outer or scheme.rows < 0):
        return float(np.abs(weight).max())
    return found


def _rounded(
    weight: Floats,
    name: str,
    rows: Rows,
    sweep: Callable[[Floats], GroupQuant],
    spread: Spread,
    device: Device | None,
) -> GroupQuant:
    """By rows that compensate for each other, as `rows` says of `name`, used up; or each alone."""
    own = rows.pop(name, None)
    if own is None:
        return sweep(weight)
    parts: list[GroupQuant] = []
    order: list[NDArray[np.int32]] = []

    def rounded(some: Floats, which: NDArray[np.int32]) -> Floats:
        parts.append(sweep(some))
        order.append(which)
        return dequantize(parts[-1])

    try:
        own = factored(own, spread, device)
        round_rows(weight, own, rounded, spread, device)
    except UnsupportedError as error:
        sweep(weight)  # which says of which row of the matrix it is
        raise advised(UnsupportedError(f"of rows that compensate for others, {error}")) from error
    return joined(parts).rows(np.argsort(np.concatenate(order)))


def _weight(block: LoadedBlock, checkpoint: Weights, name: str) -> Floats:
    # None: a plan that was made without the model class, which does not know it.
    view = block.weights.get(name)
    return checkpoint.float32(name) if view is None else np.asarray(view.contiguous().numpy())


def _scheme(planned: Planned) -> Scheme:
    assert isinstance(planned.action, Scheme)
    return planned.action


def _swept(
    device: Device,
    readers: Sequence[Planned],
    seen: SiteStats,
    weight_of: Callable[[str], Floats],
    options: gptq.Options,
    rows: Rows,
    largest: Callable[[Planned, Floats], float | None],
) -> tuple[dict[str, GroupQuant], tuple[str, ...]]:
    """All readers by name, which share a factor that leaves the device with the last of them."""
    from qtool.methods import gptq_device

    with device.alone, device.explained():
        given = gptq_device.factor(gram_on(device, seen), options, seen.count)
        made = {}
        for planned in readers:
            weight = weight_of(planned.name)
            sweep = partial(
                gptq_device.quantize_with,
                device,
                given=given,
                scheme=_scheme(planned),
                options=options,
                largest=largest(planned, weight),
            )
            with methods.named(planned.name):
                made[planned.name] = _rounded(weight, planned.name, rows, sweep, in_turn, device)
        return made, given.notes
