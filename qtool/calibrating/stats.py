"""What is measured at a site: Gram matrix, sum of squares, mean |x|, max |x|, number of tokens.

    gram = sum over tokens of x x'      [in, in], the Hessian of a linear's squared error (half)
    square = sum over tokens of x * x   [in], the diagonal of it, where no more is needed
    mean_abs, max_abs                   [in]
    halves                              [2, in], max |x| of either half of the samples, which comes
                                        with max_abs: what one half says of the other; not in files
    histogram                           of |x|, all channels together, see ranges.py; not in files

Each is additive over micro-batches (max_abs under max). A micro-batch's share is computed in
float32 by one thread, only on and above the diagonal, in strips of columns; shares are added into
float64 sums in the order of the micro-batches, whichever thread is ready first, so that the sums do
not depend on the number of threads. A thread holds one strip, never a Gram matrix of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating import ranges
from qtool.calibrating.sites import Site
from qtool.cuda.device import Device
from qtool.errors import RTN_CAN, UnsupportedError
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.stream import CPU, LoadedBlock, Stream
from qtool.streaming.turns import Turns
from qtool.streaming.workers import Workers

NEEDS = frozenset({"gram", "square", "mean_abs", "max_abs"})
# Measured where it is used: it cannot be mapped to an input that a transform divided.
HISTOGRAM = frozenset({"histogram"})
# An expert that saw fewer tokens is rounded to nearest and left out of searches: its statistics
# would be chance.
MIN_EXPERT_TOKENS = 64


# By site id, of each micro-batch: how much a token counts, [tokens].
Weights = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class SiteStats:
    """Measurements of one site; what was not asked for, or never seen, is None."""

    count: int  # tokens; 0 for an expert that none was routed to
    gram: NDArray[np.float32] | None = None  # [in, in], exactly symmetric
    mean_abs: NDArray[np.float32] | None = None  # [in]
    max_abs: NDArray[np.float32] | None = None  # [in]
    square: NDArray[np.float32] | None = None  # [in]
    histogram: NDArray[np.int64] | None = None  # [ranges.BINS]
    halves: NDArray[np.float32] | None = None  # [2, in]
    there: torch.Tensor | None = field(default=None, compare=False)  # gram on the device, or not


def is_rare(site: Site, stats: SiteStats) -> bool:
    """Whether the site's statistics are of too few tokens to go by, as a rare expert's are."""
    return site.per_token is None and stats.count < MIN_EXPERT_TOKENS


def gram_on(device: Device, stats: SiteStats) -> torch.Tensor:
    """The Gram matrix there; who asks has the device alone."""
    assert stats.gram is not None
    return device.put(stats.gram) if stats.there is None else stats.there


class _AllSeenError(Exception):
    """Ends a forward pass of which nothing more is needed."""


class _Sum:
    """The running sums of one site."""

    def __init__(self, width: int, needs: frozenset[str], place: torch.device = CPU) -> None:
        self.width = width
        self.place = place
        self.count = 0
        self.strips = strips(width)
        self.gram: list[torch.Tensor] | None = None
        if "gram" in needs:
            self.gram = [
                torch.zeros(stop - start, width - start, dtype=torch.float64, device=place)
                for start, stop in self.strips
            ]
        double = partial(torch.zeros, width, dtype=torch.float64, device=place)
        self.square: torch.Tensor | None = double() if "square" in needs else None
        self.abs: torch.Tensor | None = double() if "mean_abs" in needs else None
        self.max = torch.zeros(2, width, device=place) if "max_abs" in needs else None
        self.histogram: torch.Tensor | None = None
        if "histogram" in needs:
            self.histogram = torch.zeros(ranges.BINS, dtype=torch.int64, device=place)

    def result(self, keep: bool = False) -> SiteStats:
        """Round to float32 and mirror; the sums are used up. keep: the Gram matrix there, too."""
        if self.count == 0:
            return SiteStats(0)
        mean = _array(self.abs / self.count) if self.abs is not None else None
        halves = _array(self.max) if self.max is not None else None
        largest = halves.max(0) if halves is not None else None
        square = _array(self.square) if self.square is not None else None
        gram = there = None
        if self.gram is not None:
            full = mirrored(self.gram, self.width)
            gram, there = _array(full), full if keep else None
        histogram = self.histogram.cpu().numpy() if self.histogram is not None else None
        return SiteStats(self.count, gram, mean, largest, square, histogram, halves, there)


def _array(values: torch.Tensor) -> NDArray[np.float32]:
    """Numbers as float32 of the host."""
    return np.asarray(values.to(torch.float32).cpu().numpy())


def first_half(rows: int, samples: int, number: int, micro_batches: int) -> int:
    """How many rows of micro-batch `number` are of the first half of the samples.

    Whole samples go to either half, as the first positions of a sample are not like the others:
    half of each micro-batch, or every other one where one sample is all that it holds. (Rows that
    a router has chosen are halved as they come.)
    """
    if samples > 1 and rows % samples == 0:
        return (samples + 1) // 2 * (rows // samples)
    if samples > 1 or micro_batches == 1:
        return -(-rows // 2)
    return 0 if number % 2 else rows


def strips(width: int) -> list[tuple[int, int]]:
    """Columns in strips that are narrow enough to skip most of the lower triangle."""
    size = max(128, -(-width // 16 // 16) * 16)
    return [(start, min(start + size, width)) for start in range(0, width, size)]


def mirrored(upper: list[torch.Tensor], width: int) -> torch.Tensor:
    """The symmetric matrix [width, width], float32, of its strips() on and above the diagonal, on
    one device; they are used up."""
    full = torch.empty(width, width, device=upper[0].device)
    for number, (start, stop) in enumerate(strips(width)):
        strip, upper[number] = upper[number], torch.empty(0)
        full[start:stop, start:] = strip
        del strip
        full[stop:, start:stop] = full[start:stop, stop:].T
        corner = full[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).T)
    return full


def collect(
    block: LoadedBlock,
    stream: Stream,
    sites: Sequence[Site],
    needs: Iterable[str],
    workers: Workers,
    advance: bool = False,
    kept_bytes: int = 0,
    weights: Weights | None = None,
) -> dict[str, SiteStats]:
    """Run the block over the stream, whose hidden states stay, and measure sites, by site id.

    needs: any of NEEDS and HISTOGRAM. Where memory is short, call it for some sites at a time: the
    forward pass stops after the last of them. advance: run it to its end instead and leave its
    outputs in the stream, which spares Skeleton.advance a second pass where the block is not
    changed. kept_bytes: of a device, for Gram matrices that stay there, too. weights: of some
    sites that read each token once, how much a token counts in sums of products.
    """
    wanted = frozenset(needs)
    assert wanted <= NEEDS | HISTOGRAM
    index = WeightIndex(block.module)
    by_matrix = {site.matrix: site for site in sites}
    sums = {site.id: _Sum(site.in_features, wanted, stream.place) for site in sites}
    turns = Turns()
    routed = [site for site in sites if site.per_token is None]

    def measure(number: int) -> None:
        hidden = stream.hidden[number]  # once: it may come from a disk, or go to a device
        samples, length = hidden.shape[:2]
        left = {s.id: s.per_token * samples * length for s in sites if s.per_token is not None}
        # How many rows an expert reads, in how many calls, is known only when the pass is over.
        kept: dict[str, list[torch.Tensor]] = {}

        def add(site: str, rows: torch.Tensor, last: bool, own: torch.Tensor | None = None) -> None:
            first = first_half(len(rows), samples, number, len(stream.hidden))
            _add(sums[site], rows, first, site, number, turns, last, own)

        def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
            site = by_matrix.get(matrix)
            if site is None:
                return
            rows = x.reshape(-1, x.shape[-1])
            if site.per_token is None:
                kept.setdefault(site.id, []).append(rows)
                return
            own = None
            if weights is not None and site.id in weights:
                done = samples * length - left[site.id]
                own = weights[site.id][number][done : done + len(rows)].to(rows.device)
            left[site.id] -= len(rows)
            if left[site.id] < 0:
                raise UnsupportedError(
                    f"the input of {site.id}: it reads more than the {site.per_token} rows for "
                    f"each token that it read on a small input; {RTN_CAN}"
                )
            add(site.id, rows, left[site.id] == 0, own)
            if not advance and not routed and not any(left.values()):
                raise _AllSeenError

        with turns.taking(number), torch.no_grad():
            with suppress(_AllSeenError), ObserveLinears(index, observe):
                output = block.passed(hidden, stream.calls[block.index][number])
                if advance:
                    stream.hidden[number] = output
                del output
            for site in routed:
                rows = kept.pop(site.id, [])
                empty = torch.empty(0, site.in_features, device=stream.place)
                add(site.id, torch.cat([empty, *rows]), True)
            for site in sites:
                if left.get(site.id):  # it read fewer rows: the next one must not wait for more
                    add(site.id, torch.empty(0, site.in_features), True)

    if sites or advance:
        workers.map(measure, range(len(stream.hidden)))
    found = {}
    for site in sites:
        size = 4 * site.in_features**2
        keep = "gram" in wanted and size <= kept_bytes
        kept_bytes -= size if keep else 0
        found[site.id] = sums.pop(site.id).result(keep)
    return found


def gram_of(
    rows_of: Callable[[int], torch.Tensor], count: int, width: int, workers: Workers
) -> SiteStats:
    """The Gram matrix of what `count` micro-batches give, rows_of(number) -> [tokens, width], on
    the CPU; summed as those of sites are."""
    total, turns = _Sum(width, frozenset({"gram"})), Turns()

    def measure(number: int) -> None:
        with turns.taking(number):
            _add(total, rows_of(number), 0, "", number, turns, True)

    workers.map(measure, range(count))
    return total.result()


def _add(
    total: _Sum,
    rows: torch.Tensor,
    first: int,
    site: str,
    number: int,
    turns: Turns,
    last: bool,
    weights: torch.Tensor | None = None,
) -> None:
    """Add one call's rows [tokens, in] when the micro-batches before this one have been added.

    `first`: of them that are of the first half of the samples.
    `last`: this is the micro-batch's last call of the site, so that the next one may go on.
    `weights`: [tokens], how much each counts in sums of products.
    """
    if total.gram is not None:
        counted = rows if weights is None else rows * weights[:, None].sqrt()
        for place, (start, stop) in enumerate(total.strips):
            product = counted[:, start:stop].T @ counted[:, start:] if len(rows) else None
            turns.wait((site, place), number)
            if product is not None:
                total.gram[place].add_(product)
            if last:
                turns.passed((site, place), number)
    square = mean = largest = histogram = None
    if len(rows) and total.histogram is not None:
        histogram = ranges.counts(rows)
    if len(rows) and total.square is not None:
        square = rows.square().sum(0)
    if len(rows) and (total.abs is not None or total.max is not None):
        absolute = rows.abs()
        mean = absolute.sum(0) if total.abs is not None else None
        if total.max is not None:
            largest = torch.zeros_like(total.max)
            for half, part in zip(largest, (absolute[:first], absolute[first:]), strict=True):
                if len(part):
                    half.copy_(part.amax(0))
        del absolute
    turns.wait(site, number)
    total.count += len(rows)
    if total.square is not None and square is not None:
        total.square.add_(square)
    if total.histogram is not None and histogram is not None:
        total.histogram.add_(histogram)
    if total.abs is not None and mean is not None:
        total.abs.add_(mean)
    if total.max is not None and largest is not None:
        torch.maximum(total.max, largest, out=total.max)
    if last:
        turns.passed(site, number)
