"""AWQ: channels whose input is large get a larger scale, so that rounding hurts them less.

    s = mean|x|^a / sqrt(max * min)      a on a grid in [0, 1), per site or fold group
    y = (x / s) (W s)'                   W s is quantized; x / s is folded into what makes x

The exponent is the one with the least output error over all matrices that read the input,

    sum of tr(E H E'),   E = Q(W s) / s - W,   H = X'X

which needs no forward pass: with the Gram matrix it is the exact squared error of these outputs
on the calibration tokens. (The paper's own search measures the output of the parent module.)
Readers that stay dense are compensated, not measured; where there are any, scales are powers of
two, so that no bit of a 16-bit matrix is lost.

Which producer can take x / s is proved by numbers (`qtool.transforms.fold`); where none can, the
input keeps its scale and a note says so. What rounds afterwards is another module's business, the
clipping of the paper included: `qtool.methods.rtn` with clip, or GPTQ.

Source: Lin et al., AWQ, 2023, section 3.2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from qtool import grid, native
from qtool.plan import Plan
from qtool.scheme import Scheme
from qtool.sites import BlockSites, Site
from qtool.stats import SiteStats
from qtool.stream import LoadedBlock, Stream
from qtool.transforms import fold

if TYPE_CHECKING:
    from qtool.recipe import Recipe

NEEDS: frozenset[str] = frozenset({"gram", "mean_abs"})

Floats = NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")

# Rows of a fold group that the search looks at. The exponent is one number for all of them, so a
# part shows it as well; products with the Gram matrix are the search's whole cost.
_FEWEST_ROWS, _MOST_ROWS, _ROW_BUDGET = 256, 2048, 1 << 29
_FEWEST_OF_A_READER = 16
_LEAST_MEAN = 1e-4  # of the largest channel, for channels that are nearly silent


class Workers(Protocol):
    """Runs things side by side; results come in order."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]: ...


@dataclass(frozen=True)
class Measured:
    """Some rows of a matrix that will be quantized, with what its input looks like."""

    weight: Floats  # [rows, in]
    gram: NDArray[np.floating]  # [in, in]
    scheme: Scheme
    share: float = 1.0  # of the matrix' rows that these are


@dataclass(frozen=True)
class Applied:
    """What apply() did to a block."""

    stats: dict[str, SiteStats]  # of the new inputs, by site id
    changed: frozenset[str]  # dense tensors with new values
    notes: tuple[str, ...] = ()


def candidates(mean_abs: Floats, count: int) -> list[Floats]:
    """Scales for `count` exponents from 0 on; the first is all ones. mean_abs: [in]."""
    found = []
    live = mean_abs > 0
    if not live.any():
        return [np.ones_like(mean_abs)]
    level = np.maximum(mean_abs.astype(np.float64), _LEAST_MEAN * float(mean_abs.max()))
    for step in range(count):
        scale = level ** (step / count)
        scale /= np.sqrt(scale[live].max() * scale[live].min())
        # A channel that is always zero needs no scale, and would stretch the range of all others.
        scale[~live] = 1
        found.append(scale.astype(np.float32))
    return found


def error_of(measured: Measured, scale: Floats) -> float:
    """Squared output error of one matrix with its input divided by scale [in]."""
    scaled = measured.weight * scale
    found = native.quantize_groups(
        scaled,
        bits=measured.scheme.bits,
        group_size=measured.scheme.group_size,
        symmetric=measured.scheme.symmetric,
        reach=grid.reach(measured.scheme.bits),
        dequantize=True,
        threads=1,
    )
    assert found.dequantized is not None
    error = found.dequantized
    error /= scale
    error -= measured.weight
    tensor = torch.from_numpy(error)
    product = tensor @ torch.from_numpy(measured.gram)
    return float((product * tensor).sum(dtype=torch.float64)) / measured.share


def search(
    readers: Sequence[Measured], scales: Sequence[Floats], workers: Workers
) -> tuple[int, list[float]]:
    """Which of the scales has the least error, and the error of each."""

    def total(scale: Floats) -> float:
        return sum(error_of(reader, scale) for reader in readers)

    errors = workers.map(total, scales)
    return int(np.argmin(errors)), errors


def map_stats(stats: SiteStats, scale: Floats) -> SiteStats:
    """The statistics of x / scale from those of x. Overwrites the Gram matrix."""
    gram = stats.gram
    if gram is not None:
        gram /= scale
        gram /= scale[:, None]
    return replace(
        stats,
        gram=gram,
        mean_abs=None if stats.mean_abs is None else stats.mean_abs / scale,
        max_abs=None if stats.max_abs is None else stats.max_abs / scale,
    )


def apply(
    block: LoadedBlock,
    found: BlockSites,
    stats: Mapping[str, SiteStats],
    plan: Plan,
    recipe: "Recipe",
    stream: Stream,
    workers: Workers,
) -> Applied:
    """Search and fold the scales of a block, in place.

    Sites without a quantized reader stay as they are. Errors of an expert count by the tokens it
    saw. stats are used up.
    """
    result = dict(stats)
    changed: set[str] = set()
    notes: list[str] = []
    for sites, chosen in _proved_folds(block, found, stats, stream):
        measured = _measured(block, sites, stats, plan)
        if not measured:
            continue
        names = [name for site in sites for name in site.names]
        if chosen is None:
            listed = _listed([name.removeprefix(block.prefix) for name in names])
            notes.append(f"no AWQ scales for the input of {listed}: nothing before it takes them")
            continue
        dense = [name for name in names if plan.by_name[name].scheme is None]
        if chosen.rows is not None and plan.by_name[chosen.producer].scheme is None:
            dense.append(chosen.producer)
        scales = candidates(chosen.tied(_mean_abs(sites, stats)), recipe.awq.grid)
        if dense:
            scales = [np.exp2(np.rint(np.log2(scale))).astype(np.float32) for scale in scales]
        best, _ = search(measured, scales, workers)
        if (scales[best] == 1).all():
            continue
        exact = fold.apply(block, chosen, scales[best], lambda name: plan.by_name[name].dtype)
        changed.update(dense)
        if chosen.rows is None:
            changed.add(chosen.producer)
        if chosen.bias is not None:
            changed.add(chosen.bias)
        for site in sites:
            if site.id in result:
                result[site.id] = map_stats(result[site.id], exact)
    return Applied(result, frozenset(changed), tuple(notes))


def _proved_folds(
    block: LoadedBlock, found: BlockSites, stats: Mapping[str, SiteStats], stream: Stream
) -> list[tuple[tuple[Site, ...], fold.Fold | None]]:
    """Every group of sites that share scales, with the first producer proved to take them.

    All is proved before anything is changed. Experts are alike: one that the probe reaches
    stands for the others of its parameter.
    """
    hidden, call = stream.probe(block.index)
    expected = block.run(hidden, call)

    def first_proved(options: Sequence[Sequence[fold.Fold]]) -> int | None:
        """options: by site, then number. The number that the first site with an answer proves."""
        for number in range(len(options[0])):
            answers = (fold.proved(block, of[number], hidden, call, expected) for of in options)
            if next((answer for answer in answers if answer is not None), False):
                return number
        return None

    groups: list[tuple[tuple[Site, ...], fold.Fold | None]] = []
    for norm, sites in found.fold_groups().items():
        if any(site.id in stats for site in sites):
            norms = fold.norm_folds(norm, sites)
            number = first_proved([norms])
            groups.append((sites, None if number is None else norms[number]))
    alike: dict[object, list[Site]] = {}
    for site in found.sites:
        if site.producer is None and site.id in stats:
            key = site.id if site.expert is None else site.matrix.parameter
            alike.setdefault(key, []).append(site)
    for family in alike.values():
        options = [list(fold.projection_folds(block, found, site)) for site in family]
        number = first_proved(options)
        groups += [
            ((site,), None if number is None else of[number])
            for site, of in zip(family, options, strict=True)
        ]
    return groups


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _mean_abs(sites: Sequence[Site], stats: Mapping[str, SiteStats]) -> Floats:
    """mean|x| over the rows that a group's sites saw, [in]."""
    whole = [site for site in sites if site.expert is None and site.id in stats]
    seen = [stats[site.id] for site in whole or sites if site.id in stats]
    total = np.zeros(sites[0].in_features)
    for one in seen:
        if one.mean_abs is not None:
            total += one.count * one.mean_abs.astype(np.float64)
    return (total / max(1, sum(one.count for one in seen))).astype(np.float32)


def _measured(
    block: LoadedBlock, sites: Sequence[Site], stats: Mapping[str, SiteStats], plan: Plan
) -> list[Measured]:
    """Evenly spaced rows of every quantized reader whose input was seen."""
    readers = [
        (name, scheme, gram)
        for site in sites
        if site.id in stats and (gram := stats[site.id].gram) is not None
        for name in site.names
        if (scheme := plan.by_name[name].scheme) is not None
    ]
    rows = sum(block.weights[name].shape[0] for name, _, _ in readers)
    width = sites[0].in_features
    wanted = min(max(_ROW_BUDGET // width**2, _FEWEST_ROWS), _MOST_ROWS)
    result = []
    for name, scheme, gram in readers:
        weight = block.weights[name]
        count = max(_FEWEST_OF_A_READER, weight.shape[0] * wanted // rows)
        count = min(count, weight.shape[0])
        picked = np.linspace(0, weight.shape[0] - 1, count).astype(np.int64)
        part = weight[torch.from_numpy(picked)].numpy()
        result.append(Measured(part, gram, scheme, count / weight.shape[0]))
    return result
