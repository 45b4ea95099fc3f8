"""The search for SmoothQuant's exponent: which scales of an input do the least harm.

A grid of exponents from 0 to 1, and no scales at all, for each input by itself. The cost of a
candidate is what both roundings are expected to do to the outputs,

    tr(E H E')  +  N / n * |(R(x / s) - x / s) Q(W s)'|^2         E = Q(W s) / s - W

the first over all N calibration tokens through the Gram matrix H, the second over n of them, which
are rounded as the recipe rounds activations (R). The errors of both are taken to be uncorrelated.
Weights count as rounded to nearest, whatever rounds them afterwards.

A scale of R that is stored will meet inputs beyond its range, and the more of them, the more
channels a large exponent has made as wide as that. The tokens that the range was taken from never
exceed it, so that they cannot judge. The second term is then computed crosswise: s and the scale
of R from one half of the samples, x from the other. (Files of statistics know no halves.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats, first_half
from qtool.methods import activations, rtn
from qtool.methods.activations import Rounding
from qtool.planned import PlannedAll
from qtool.scheme import Scheme
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.transforms.proved import Floats

if TYPE_CHECKING:
    from qtool.recipe.recipe import Recipe

_ROWS = 128  # of the weights of a group of sites, that the search looks at
_FEWEST_OF_A_READER = 16
_TOKENS = 128  # of which the search rounds the inputs

Halves = tuple[Floats, Floats]  # some tokens of either half of the samples, each [tokens, in]


@dataclass(frozen=True)
class Measured:
    """Some rows of a matrix that will be quantized, and what it reads."""

    weight: Floats  # [rows, in]
    scheme: Scheme
    share: float  # of the matrix' rows that these are
    gram: NDArray[np.floating]  # [in, in]
    tokens: int  # in the Gram matrix
    inputs: Halves  # none where inputs are not rounded


def cost(
    readers: Sequence[Measured],
    recipe: "Recipe",
    levels: Sequence[Floats],
    scales: Sequence[Floats],
) -> float:
    """Expected squared error of all readers' outputs with an input divided by scales[0], [in].

    levels: max |x| over all samples, and over either half of them where these shall judge, each
    [in]; scales: what a candidate makes of each.
    """
    scale, halves = scales[0], slice(0, 2)
    trials = [(levels[0], scale, halves)]
    if len(levels) > 1:
        trials = [(levels[1], scales[1], slice(1, 2)), (levels[2], scales[2], slice(0, 1))]
    total = 0.0
    for reader in readers:
        rounded = _rounded(reader, scale, recipe)
        error = (rounded - torch.from_numpy(reader.weight * scale)) / torch.from_numpy(scale)
        lost = float((error @ torch.from_numpy(reader.gram)).mul_(error).sum(dtype=torch.float64))
        seen = sum(map(len, reader.inputs))
        for level, tried, others in trials:
            rounding = input_rounding(recipe, float((level / tried).max()))
            if rounding is None or not seen:
                continue
            weight = rounded if tried is scale else _rounded(reader, tried, recipe)
            x = torch.from_numpy(np.concatenate(reader.inputs[others]) / tried)
            error = (rounding.apply(x) - x) @ weight.T
            lost += reader.tokens / seen * float(error.square_().sum(dtype=torch.float64))
        total += lost / reader.share
    return total


def _rounded(reader: Measured, scale: Floats, recipe: "Recipe") -> torch.Tensor:
    scaled = reader.weight * scale
    quant = rtn.quantize(scaled, None, reader.scheme, rtn.Options(recipe.clips)).quant
    return torch.from_numpy(quant.dequantize())


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
        return activations.stored_integers(wanted.bits, scale, 0.0)
    if wanted.scale == "tensor":  # the sampled tokens stand for those that come together
        both = (activations.fp8_together(), activations.whole_together(wanted.bits))
        return both[0] if wanted.type == "float" else both[1]
    if wanted.type == "float":
        return activations.fp8(wanted.group_size)
    return activations.integers(wanted.bits, wanted.group_size, True)


def levels(recipe: "Recipe", stats: Sequence[SiteStats]) -> list[Floats]:
    """max |x| of sites with one input; then of either half of the samples, where a scale of
    inputs will be stored."""
    whole: Floats = np.maximum.reduce([one.max_abs for one in stats if one.max_abs is not None])
    wanted = recipe.activations
    known = [one.halves for one in stats if one.halves is not None]
    if wanted is None or not wanted.stored_as or not known:
        return [whole]
    halves = list(np.maximum.reduce(known))
    return [whole, *halves] if all(half.any() for half in halves) else [whole]


def sampled_inputs(block: LoadedBlock, stream: Stream, sites: Sequence[Site]) -> dict[str, Halves]:
    """Evenly spaced rows of what sites read in the first micro-batches, by site id."""
    by_matrix = {site.matrix: site.id for site in sites}
    kept: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    count = len(stream.hidden)
    for number in range(min(count, 1 if len(stream.hidden[0]) > 1 else 2)):
        samples = len(stream.hidden[number])

        def observe(
            matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None,
            number: int = number, samples: int = samples,
        ) -> None:  # fmt: skip
            name = by_matrix.get(matrix)
            if name is not None:
                rows = x.reshape(-1, x.shape[-1])
                second = torch.arange(len(rows)) >= first_half(len(rows), samples, number, count)
                chosen = _spaced(len(rows), _TOKENS)
                kept.setdefault(name, []).append((rows[chosen], second[chosen]))

        with ObserveLinears(WeightIndex(block.module), observe):
            block.run(stream.hidden[number], stream.calls[block.index][number])
    result = {}
    for name, parts in kept.items():
        rows, second = (torch.cat(part) for part in zip(*parts, strict=True))
        chosen = _spaced(len(rows), _TOKENS)
        rows, second = rows[chosen], second[chosen]
        result[name] = (rows[~second].numpy(), rows[second].numpy())
    return result


def measured(
    block: LoadedBlock,
    sites: Sequence[Site],
    stats: Mapping[str, SiteStats],
    plan: PlannedAll,
    inputs: Mapping[str, Halves],
) -> list[Measured]:
    """Evenly spaced rows of every quantized reader."""
    readers = [
        (site, name, scheme)
        for site in sites
        for name in site.names
        if (scheme := plan.target(name)) is not None
    ]
    rows = sum(block.weights[name].shape[0] for _, name, _ in readers)
    found = []
    for site, name, scheme in readers:
        weight, seen = block.weights[name], stats[site.id]
        assert seen.gram is not None
        count = max(_FEWEST_OF_A_READER, weight.shape[0] * _ROWS // rows)
        part = weight[_spaced(weight.shape[0], count)].numpy()
        none = np.empty((0, weight.shape[1]), np.float32)
        sample = inputs.get(site.id, (none, none))
        share = len(part) / weight.shape[0]
        found.append(Measured(part, scheme, share, seen.gram, seen.count, sample))
    return found


def _spaced(count: int, most: int) -> torch.Tensor:
    return torch.linspace(0, max(0, count - 1), min(count, most)).long()
