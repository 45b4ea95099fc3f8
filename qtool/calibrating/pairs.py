"""What a block's inputs are in the quantized model beside what they are in the original one.

    gram  = sum over tokens of x x'          [in, in], x: behind blocks that are quantized
    cross = sum over tokens of (y - x) x'    [in, in], y: behind those of the original

The block is as it is in the original, so both differ by what earlier blocks have lost. Sums are
made as those of qtool.calibrating.stats: in the order of the micro-batches.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from qtool.calibrating.linears import Matrix, ObserveLinears, WeightIndex
from qtool.calibrating.sites import Site
from qtool.calibrating.stats import strips
from qtool.calibrating.stream import LoadedBlock, States, Stream
from qtool.calibrating.turns import Turns
from qtool.calibrating.workers import Workers
from qtool.errors import UnsupportedError

Rows = dict[str, deque[torch.Tensor]]  # by site id, [tokens, in] of each call


class _SeenError(Exception):
    """Ends a forward pass of which nothing more is needed."""


@dataclass(frozen=True)
class Pair:
    """Of one site, float32, where the block was."""

    gram: torch.Tensor  # [in, in], symmetric
    cross: torch.Tensor  # [in, in]


def collect_pairs(
    block: LoadedBlock,
    stream: Stream,
    originals: States,
    sites: Sequence[Site],
    workers: Workers,
    advance: bool,
) -> dict[str, Pair]:
    """Run the block over both, by site id. stream: of the quantized model, which stays.

    advance: what the block makes of the original's states takes their place. Sites that a router
    chooses rows of are none of these: either model chooses its own.
    """
    index = WeightIndex(block.module)
    by_matrix = {site.matrix: site for site in sites}
    sums = {site.id: _Sums(site.in_features, stream.place) for site in sites}
    turns = Turns()

    def pair(number: int) -> None:
        call = stream.calls[block.index][number]

        def passed(states: torch.Tensor, see: Callable[[Site, torch.Tensor], None]) -> torch.Tensor:
            def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
                site = by_matrix.get(matrix)
                if site is not None:
                    see(site, x.reshape(-1, x.shape[-1]))

            with ObserveLinears(index, observe):
                return block.passed(states, call)

        before: Rows = defaultdict(deque)
        left: dict[str, int] = {}
        try:
            with torch.no_grad():
                hidden = originals[number]
                tokens = hidden.shape[0] * hidden.shape[1]
                left = {s.id: (s.per_token or 0) * tokens for s in sites}
                output = passed(hidden, lambda site, rows: before[site.id].append(rows))
                if advance:
                    originals[number] = output
                del hidden, output
                if not sites:
                    return

                def add(site: Site, rows: torch.Tensor) -> None:
                    other = before[site.id].popleft() if before[site.id] else None
                    left[site.id] -= len(rows)
                    if other is None or other.shape != rows.shape or left[site.id] < 0:
                        raise UnsupportedError(
                            f"the input of {site.id}: how often it is read depends on its values, "
                            "so that gptq.gptaq cannot compare two models there; leave it out"
                        )
                    sums[site.id].add(rows, other, number, turns, not left[site.id])
                    if not any(count > 0 for count in left.values()):
                        raise _SeenError

                with suppress(_SeenError):
                    passed(stream.hidden[number], add)
                for site in sites:  # the next one must not wait for more
                    if left[site.id] > 0:
                        sums[site.id].none(number, turns)
        except BaseException:
            turns.fail(number)
            raise

    workers.map(pair, range(len(stream.hidden)))
    return {site.id: sums.pop(site.id).result() for site in sites}


class _Sums:
    """The running sums of one site, in strips of rows."""

    def __init__(self, width: int, place: torch.device) -> None:
        self._width, self._strips = width, strips(width)
        self._gram = [torch.zeros(b - a, width - a, device=place) for a, b in self._strips]
        self._cross = [torch.zeros(b - a, width, device=place) for a, b in self._strips]

    def add(
        self, rows: torch.Tensor, other: torch.Tensor, number: int, turns: Turns, last: bool
    ) -> None:
        """One call's rows [tokens, in], and those of the original, once those of earlier
        micro-batches are added. last: of this micro-batch."""
        lost = other - rows
        for place, (start, stop) in enumerate(self._strips):
            gram = rows[:, start:stop].T @ rows[:, start:]
            cross = lost[:, start:stop].T @ rows
            turns.wait((id(self), place), number)
            self._gram[place].add_(gram)
            self._cross[place].add_(cross)
            if last:
                turns.passed((id(self), place), number)

    def none(self, number: int, turns: Turns) -> None:
        """No more rows of a micro-batch."""
        for place in range(len(self._strips)):
            turns.wait((id(self), place), number)
            turns.passed((id(self), place), number)

    def result(self) -> Pair:
        """The sums are used up."""
        full = torch.empty(self._width, self._width, device=self._gram[0].device)
        for number, (start, stop) in enumerate(self._strips):
            strip, self._gram[number] = self._gram[number], torch.empty(0)
            full[start:stop, start:] = strip
            full[stop:, start:stop] = full[start:stop, stop:].T
            corner = full[start:stop, start:stop]
            corner.copy_(corner.triu() + corner.triu(1).T)
        cross = torch.cat(self._cross)
        self._cross.clear()
        return Pair(full, cross)
