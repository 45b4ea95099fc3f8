"""An input of a block in the quantized model beside what it is in the original one.

    gram  = sum over tokens of x x'          [in, in], x: behind what is quantized
    cross = sum over tokens of (y - x) x'    [in, in], y: of the original

Sums are made in the order of the micro-batches, as those of qtool.calibrating.stats, but in
float32: what that loses over some hundred of them is far below what is damped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from qtool.calibrating.sites import Site
from qtool.calibrating.stats import mirrored, strips
from qtool.errors import UnsupportedError
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.turns import Turns
from qtool.streaming.workers import Workers


class _SeenError(Exception):
    """Ends a forward pass of which nothing more is needed."""


@dataclass(frozen=True)
class Pair:
    """float32, where the block was."""

    count: int  # tokens
    gram: torch.Tensor  # [in, in], symmetric
    cross: torch.Tensor  # [in, in]


def is_compared(site: Site | None) -> bool:
    """Whether both models read the same rows there, unlike where a router chooses: either model
    chooses its own."""
    return site is not None and site.per_token is not None


def collect_pair(
    block: LoadedBlock,
    stream: Stream,
    before: LoadedBlock,
    originals: Stream,
    site: Site,
    workers: Workers,
    counts: Sequence[torch.Tensor] | None = None,
) -> Pair:
    """Run a block over the states of the quantized model, and what it was before over those of the
    original; both stay. site: one that is_compared(). counts: of each micro-batch how much a token
    does, [tokens]."""
    sums = _Sums(site.in_features, stream.place)
    count = stream.tokens * (site.per_token or 0)
    turns = Turns()

    def watched(
        one: LoadedBlock, of: Stream, number: int, see: Callable[[torch.Tensor], None]
    ) -> None:
        """Until all rows of the site are seen."""
        hidden = of.hidden[number]
        left = (site.per_token or 0) * hidden.shape[0] * hidden.shape[1]

        def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
            nonlocal left
            if matrix != site.matrix:
                return
            rows = x.reshape(-1, x.shape[-1])
            left -= len(rows)
            see(rows)
            if not left:
                raise _SeenError

        index = WeightIndex(one.module)
        with torch.no_grad(), suppress(_SeenError), ObserveLinears(index, observe):
            one.passed(hidden, of.calls[one.index][number])
        if left:
            raise UnsupportedError(
                f"the input of {site.id}: it reads another number of rows for each token than of a "
                "small input, so that gptq.gptaq cannot compare two models there; leave it out"
            )

    def pair(number: int) -> None:
        rows: deque[torch.Tensor] = deque()
        roots: torch.Tensor | None = None
        if counts is not None:
            roots = counts[number][:, None].sqrt().to(stream.place)
        done = 0
        with turns.taking(number):
            watched(before, originals, number, rows.append)

            def add(x: torch.Tensor) -> None:
                nonlocal done
                y = rows.popleft() if rows else None
                if y is None or y.shape != x.shape:
                    raise UnsupportedError(
                        f"the input of {site.id}: how often it is read depends on its values, so "
                        "that gptq.gptaq cannot compare two models there; leave it out"
                    )
                if roots is not None:
                    own = roots[done : done + len(x)]
                    x, y, done = x * own, y * own, done + len(x)
                sums.add(x, y, number, turns)

            watched(block, stream, number, add)
            sums.done(number, turns)

    workers.map(pair, range(len(stream.hidden)))
    return sums.result(count)


class _Sums:
    """The running sums of one site, in strips of rows."""

    def __init__(self, width: int, place: torch.device) -> None:
        self._width, self._strips = width, strips(width)
        self._gram = [torch.zeros(b - a, width - a, device=place) for a, b in self._strips]
        self._cross = torch.zeros(width, width, device=place)

    def add(self, rows: torch.Tensor, other: torch.Tensor, number: int, turns: Turns) -> None:
        """One call's rows [tokens, in], and those of the original, once those of earlier
        micro-batches are added."""
        lost = other - rows
        for place, (start, stop) in enumerate(self._strips):
            gram = rows[:, start:stop].T @ rows[:, start:]
            cross = lost[:, start:stop].T @ rows
            turns.wait(place, number)
            self._gram[place].add_(gram)
            self._cross[start:stop].add_(cross)

    def done(self, number: int, turns: Turns) -> None:
        """With a micro-batch."""
        for place in range(len(self._strips)):
            turns.wait(place, number)
            turns.passed(place, number)

    def result(self, count: int) -> Pair:
        """The sums are used up."""
        return Pair(count, mirrored(self._gram, self._width), self._cross)
