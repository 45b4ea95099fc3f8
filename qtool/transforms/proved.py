"""What transforms of a block have in common: the folds that are proved, and what they leave behind.

A transform is `apply(subject, stats) -> Applied`: it rewrites weights of the subject's block in
place, and the block computes what it did before.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.sites import BlockSites, Site
from qtool.calibrating.stats import SiteStats
from qtool.checkpoints.scaled import Factor
from qtool.cuda.device import Device
from qtool.planned import PlannedAll
from qtool.scheme import UNROUNDED
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.transforms import fold

if TYPE_CHECKING:
    from qtool.recipe.recipe import Recipe

Floats = NDArray[np.float32]
_F16 = 65504.0 * 0.999  # the largest of float16; scales of norms are rounded a little
T = TypeVar("T")
R = TypeVar("R")


class Workers(Protocol):
    """Runs things side by side; results of map() come in order."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]: ...
    def spread(self, function: Callable[[Any], None], items: Iterable[Any]) -> None: ...


@dataclass(frozen=True)
class Subject:
    """A block that a transform rewrites, and what is known of it."""

    block: LoadedBlock
    found: BlockSites
    plan: PlannedAll
    recipe: "Recipe"
    stream: Stream  # before the block
    workers: Workers
    device: Device | None = None  # for searches; None: the CPU
    powers: bool = False  # of two, whatever the dtypes: all scales


@dataclass(frozen=True)
class Applied:
    """What apply() did to a block."""

    stats: dict[str, SiteStats]  # of the new inputs, by site id
    changed: frozenset[str]  # dense tensors with new values
    notes: tuple[str, ...] = ()
    factors: tuple[Factor, ...] = ()  # what was multiplied, to be done again elsewhere


def takes_part(plan: PlannedAll, name: str) -> bool:
    """Whether a matrix is quantized: here, or by another tool after this one (method: none)."""
    return plan.target(name) is not None or plan.by_name[name].action == UNROUNDED


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
        square=None if stats.square is None else stats.square / scale / scale,
        halves=None if stats.halves is None else stats.halves / scale,
        histogram=None,  # of all channels together: to be measured again
        there=None,
    )


def powers_of_two(scale: Floats) -> Floats:
    """The nearest ones: numbers of 16 bits take them without losing a bit."""
    return np.exp2(np.rint(np.log2(scale))).astype(np.float32)


def listed(names: Sequence[str]) -> str:
    """The first few of the names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def inputs_listed(groups: Iterable[Sequence[str]]) -> str:
    """Each input by the first few of its readers in a block; those of experts are one."""
    shown = (listed([*dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)])
             for names in groups)  # fmt: skip
    return "; ".join(dict.fromkeys(shown))


def proved_folds(
    block: LoadedBlock,
    found: BlockSites,
    stats: Mapping[str, SiteStats],
    stream: Stream,
    projections: bool = True,
) -> list[tuple[tuple[Site, ...], fold.Fold | None]]:
    """Every group of sites that share scales, with the first producer proved to take them.

    All is proved before anything is changed. Experts are alike: one that the probe reaches
    stands for the others of its parameter. projections: inputs that no norm makes, too.
    """
    hidden, call = stream.probe(block.index)
    expected = fold.shown(block, hidden, call)

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
    for site in found.sites if projections else ():
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


def apply_fold(
    block: LoadedBlock,
    chosen: fold.Fold,
    sites: Sequence[Site],
    scale: Floats,
    plan: PlannedAll,
    stats: dict[str, SiteStats],
) -> set[str]:
    """Fold scale [in] in, and map the statistics of the sites; dense tensors with new values."""
    exact = fold.apply(block, chosen, scale, lambda name: plan.by_name[name].dtype)
    for site in sites:
        if site.id in stats:
            stats[site.id] = map_stats(stats[site.id], exact)
    changed = set(dense_parts(chosen, sites, plan))
    if chosen.rows is None:
        changed.add(chosen.producer)
    if chosen.bias is not None:
        changed.add(chosen.bias)
    return changed


def factors_of(block: LoadedBlock, chosen: fold.Fold, scale: Floats) -> list[Factor]:
    """What folding scale [in] in multiplies."""
    found = [Factor(name, scale, True) for name in chosen.readers]
    inverse = np.asarray(1 / scale, np.float32)
    if chosen.rows is not None:
        inverse = np.ones(len(block.weights[chosen.producer]), np.float32)
        inverse[chosen.rows] = 1 / scale
    found.append(Factor(chosen.producer, inverse, False, chosen.plus_one))
    if chosen.bias is not None:
        whole = np.ones(len(block.weights[chosen.bias]), np.float32)
        whole[chosen.bias_offset :][: len(inverse)] = inverse
        found.append(Factor(chosen.bias, whole, False))
    return found


def too_large(block: LoadedBlock, chosen: fold.Fold, scale: Floats, plan: PlannedAll) -> str | None:
    """A tensor that float16, in which it is written, could not hold with scale [in] folded in."""
    for name in chosen.readers:
        if narrow(plan, name) and overflows(block.weights[name].abs().amax(0), scale):
            return name
    if chosen.rows is None:  # of the norm itself, channels that do not fit keep their scale
        parts = [] if chosen.bias is None else [(chosen.bias, block.weights[chosen.bias].abs())]
        inverse = np.asarray(1 / scale, np.float32)
    else:
        weight = block.weights[chosen.producer]
        inverse = np.ones(len(weight), np.float32)
        inverse[chosen.rows] = 1 / scale
        parts = [(chosen.producer, weight.abs().amax(1))]
        if chosen.bias is not None:
            bias = block.weights[chosen.bias][chosen.bias_offset :][: len(weight)]
            parts.append((chosen.bias, bias.abs()))
    return next((n for n, part in parts if narrow(plan, n) and overflows(part, inverse)), None)


def narrow(plan: PlannedAll, name: str) -> bool:
    """Whether a tensor is written in float16."""
    planned = plan.by_name[name]
    return planned.scheme is None and planned.dtype == "F16"


def overflows(largest: torch.Tensor, factor: Floats) -> bool:
    """Whether float16 cannot hold numbers of these sizes times factor."""
    return bool((largest.numpy() * factor).max() >= _F16)


def dense_parts(chosen: fold.Fold, sites: Sequence[Site], plan: PlannedAll) -> list[str]:
    """The matrices that a fold changes and that are written in their own dtype."""
    names = [name for site in sites for name in site.names]
    dense = [name for name in names if plan.by_name[name].scheme is None]
    if chosen.rows is not None and plan.by_name[chosen.producer].scheme is None:
        dense.append(chosen.producer)
    return dense
