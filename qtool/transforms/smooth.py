"""SmoothQuant: large channels of an input become smaller, those of the weights larger.

    s_j = max|x_j|^a / max|w_j|^(1-a)     over all tokens, and all rows of all matrices that read x
    y = (x / s) (W s)'                    x / s is folded into what makes x

With a = 1/2 both sides are as wide; a larger a leaves more to the weights. Which producer can take
x / s is proved by numbers (`qtool.transforms.fold`); where none can, the input stays and a note
says so. Where a reader or producer is written in a 16-bit dtype, or a bias is, scales are powers
of two, which lose no bit there.

`alpha: search` looks at a grid of exponents from 0 to 1, and at no scales at all, for each input by
itself. The cost of a candidate is what both roundings are expected to do to the outputs,

    tr(E H E')  +  N / n * |(R(x / s) - x / s) Q(W s)'|^2         E = Q(W s) / s - W

the first over all N calibration tokens through the Gram matrix H, the second over n of them, which
are rounded as the recipe rounds activations (R). The errors of both are taken to be uncorrelated.
Weights count as rounded to nearest, whatever rounds them afterwards.

By default the inputs that a norm makes are smoothed (`sites: norms`), as the paper does; with
`sites: all` also those that an earlier matrix makes: down_proj by up_proj, o_proj by v_proj.

Source: Xiao et al., SmoothQuant, 2022, section 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.linears import Matrix, ObserveLinears, WeightIndex
from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats, is_rare
from qtool.calibrating.stream import LoadedBlock, Stream
from qtool.methods import rtn
from qtool.plan.plan import Plan
from qtool.quality import activations
from qtool.quality.activations import Rounding
from qtool.scheme import Scheme
from qtool.transforms.proved import (
    Applied,
    Floats,
    Subject,
    apply_fold,
    dense_parts,
    listed,
    powers_of_two,
    proved_folds,
    takes_part,
    too_large,
)

if TYPE_CHECKING:
    from qtool.recipe.recipe import Recipe

_LEAST = 1e-4  # of the largest channel, for channels that are nearly silent
_ROWS = 128  # of the weights of a group of sites, that the search looks at
_FEWEST_OF_A_READER = 16
_TOKENS = 128  # of which the search rounds the inputs
_16_BITS = ("F16", "BF16")


@dataclass(frozen=True)
class Measured:
    """Some rows of a matrix that will be quantized, and what it reads."""

    weight: Floats  # [rows, in]
    scheme: Scheme
    share: float  # of the matrix' rows that these are
    gram: NDArray[np.floating]  # [in, in]
    tokens: int  # in the Gram matrix
    inputs: Floats  # [some tokens, in]; none where inputs are not rounded


def needs(recipe: "Recipe") -> frozenset[str]:
    """The statistics that it asks for."""
    return frozenset({"max_abs"} | ({"gram"} if recipe.smooth.alpha == "search" else set()))


def scales(max_abs: Floats, max_weight: Floats, alpha: float) -> Floats:
    """max|x|^a / max|w|^(1-a), [in]. A channel that is always zero keeps scale 1."""
    live = (max_abs > 0) & (max_weight > 0)
    if not live.any():
        return np.ones_like(max_abs)
    x, w = (
        np.log(np.maximum(level.astype(np.float64), _LEAST * float(level.max())))
        for level in (max_abs, max_weight)
    )
    return np.where(live, np.exp(alpha * x - (1 - alpha) * w), 1).astype(np.float32)


def apply(subject: Subject, stats: Mapping[str, SiteStats]) -> Applied:
    """Smooth the inputs of a block, in place. stats are used up."""
    block, plan, recipe = subject.block, subject.plan, subject.recipe
    found, stream = subject.found, subject.stream
    result = dict(stats)
    changed: set[str] = set()
    notes: list[str] = []
    smoothed: list[str] = []
    options = recipe.smooth
    groups = proved_folds(block, found, stats, stream, projections=options.sites == "all")
    inputs: dict[str, Floats] = {}
    if options.alpha == "search" and recipe.activations is not None:
        inputs = sampled_inputs(block, stream, found.sites)
    for sites, chosen in groups:
        names = [name for site in sites for name in site.names if takes_part(plan, name)]
        seen = [s for s in sites if s.id in stats and not is_rare(s, stats[s.id])]
        seen = [site for site in seen if stats[site.id].max_abs is not None]
        if not names or not seen:
            continue
        if chosen is None:
            said = listed([name.removeprefix(block.prefix) for name in names])
            notes.append(f"not smoothed: the input of {said}; nothing before it takes scales")
            continue
        max_abs = chosen.largest(_max_abs(seen, stats))
        max_weight = chosen.largest(_max_weight(block, names))
        exact = dense_parts(chosen, sites, plan) or (
            chosen.bias is not None and plan.by_name[chosen.bias].dtype in _16_BITS
        )

        def of(
            alpha: float,
            x: Floats = max_abs,
            w: Floats = max_weight,
            exact: object = exact,
        ) -> Floats:
            return powers_of_two(scales(x, w, alpha)) if exact else scales(x, w, alpha)

        if options.alpha == "search":
            candidates = [np.ones_like(max_abs)]
            candidates += [of(step / options.grid) for step in range(options.grid + 1)]
            measured = _measured(block, seen, stats, plan, inputs)
            work = partial(cost, measured, recipe, max_abs)
            best = candidates[int(np.argmin(subject.workers.map(work, candidates)))]
        else:
            best = of(float(options.alpha))
        lost = too_large(block, chosen, best, plan)
        if lost is not None:
            notes.append(f"not smoothed: {lost} could not hold its scales in float16")
        elif not (best == 1).all():
            changed |= apply_fold(block, chosen, sites, best, plan, result)
            smoothed += [name.removeprefix(block.prefix) for name in names]
    if smoothed:
        notes.append(f"smoothed: the inputs of {listed(smoothed)}")
    return Applied(result, frozenset(changed), tuple(notes))


def cost(readers: Sequence[Measured], recipe: "Recipe", max_abs: Floats, scale: Floats) -> float:
    """Expected squared error of all readers' outputs with an input divided by scale [in]."""
    total = 0.0
    rounding = input_rounding(recipe, float((max_abs / scale).max()))
    for reader in readers:
        scaled = reader.weight * scale
        quant = rtn.quantize(scaled, None, reader.scheme, rtn.Options(recipe.clips)).quant
        rounded = torch.from_numpy(quant.dequantize())
        error = (rounded - torch.from_numpy(scaled)) / torch.from_numpy(scale)
        lost = (error @ torch.from_numpy(reader.gram)).mul_(error).sum(dtype=torch.float64)
        if rounding is not None and len(reader.inputs):
            x = torch.from_numpy(reader.inputs) / torch.from_numpy(scale)
            error = (rounding.apply(x) - x) @ rounded.T
            per_token = error.square_().sum(dtype=torch.float64) / len(reader.inputs)
            lost += reader.tokens * per_token
        total += float(lost) / reader.share
    return total


def input_rounding(recipe: "Recipe", largest: float) -> Rounding | None:
    """What the recipe does to inputs; largest: max|x|, for a scale that is stored."""
    wanted = recipe.activations
    if wanted is None:
        return None
    if wanted.type == "mxfp4":
        return activations.microscaling(wanted.bits)
    if wanted.type == "nvfp4":
        return activations.nvfp4(wanted.reach / max(largest, 1e-30))
    if not wanted.dynamic:
        scale = max(largest / wanted.reach, 1e-30)
        if wanted.type == "float":
            return activations.stored_fp8(scale)
        return activations.stored_whole_numbers(wanted.bits, scale, 0.0)
    if wanted.scale == "tensor":  # the sampled tokens stand for those that come together
        both = (activations.fp8_together(), activations.whole_together(wanted.bits))
        return both[0] if wanted.type == "float" else both[1]
    if wanted.type == "float":
        return activations.fp8(wanted.group_size)
    return activations.whole_numbers(wanted.bits, wanted.group_size, True)


def sampled_inputs(block: LoadedBlock, stream: Stream, sites: Sequence[Site]) -> dict[str, Floats]:
    """Evenly spaced rows of what sites read in the first micro-batch, by site id."""
    by_matrix = {site.matrix: site.id for site in sites}
    kept: dict[str, list[Floats]] = {}

    def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        name = by_matrix.get(matrix)
        if name is not None:
            rows = x.reshape(-1, x.shape[-1])
            kept.setdefault(name, []).append(rows[_spaced(len(rows), _TOKENS)].numpy())

    with ObserveLinears(WeightIndex(block.module), observe):
        block.run(stream.hidden[0], stream.calls[block.index][0])
    whole = {name: np.concatenate(parts) for name, parts in kept.items()}
    return {name: rows[_spaced(len(rows), _TOKENS).numpy()] for name, rows in whole.items()}


def _spaced(count: int, most: int) -> torch.Tensor:
    return torch.linspace(0, max(0, count - 1), min(count, most)).long()


def _max_abs(sites: Sequence[Site], stats: Mapping[str, SiteStats]) -> Floats:
    levels = [level for site in sites if (level := stats[site.id].max_abs) is not None]
    largest: Floats = np.maximum.reduce(levels)
    return largest


def _max_weight(block: LoadedBlock, names: Sequence[str]) -> Floats:
    levels = [block.weights[name].abs().amax(0).numpy() for name in names]
    largest: Floats = np.maximum.reduce(levels)
    return largest


def _measured(
    block: LoadedBlock,
    sites: Sequence[Site],
    stats: Mapping[str, SiteStats],
    plan: Plan,
    inputs: Mapping[str, Floats],
) -> list[Measured]:
    """Evenly spaced rows of every quantized reader."""
    readers = [
        (site, name, scheme)
        for site in sites
        for name in site.names
        if (scheme := plan.target(name)) is not None
    ]
    rows = sum(block.weights[name].shape[0] for _, name, _ in readers)
    result = []
    for site, name, scheme in readers:
        weight, seen = block.weights[name], stats[site.id]
        assert seen.gram is not None
        count = max(_FEWEST_OF_A_READER, weight.shape[0] * _ROWS // rows)
        part = weight[_spaced(weight.shape[0], count)].numpy()
        sample = inputs.get(site.id, np.empty((0, weight.shape[1]), np.float32))
        share = len(part) / weight.shape[0]
        result.append(Measured(part, scheme, share, seen.gram, seen.count, sample))
    return result
