"""gptq.guided: in GPTQ's sums of keys and values a token counts by what others read of it.

    gram = sum over tokens of weight(token) x x'        for each matrix, not for each input
    weight(token) = (g^2 / their mean)^power / the mean of that
    g^2 = mean over what the matrix gives of the squared slopes there, of a random sum of all
          numbers that the first matrix behind the attention gives, each drawn from N(0, 1)

Attention reads some tokens many times, the first of a text most of all, and others hardly ever: an
error in their keys and values costs as much more or less. Plain GPTQ counts all alike. Which
matrices other tokens read of, whatever a model calls them and however it mixes tokens, is seen on
the probe: those on whose outputs at earlier tokens the block's last output depends. Queries, the
MLP and what gathers the heads are read by their own token alone, and keep to plain sums; so do
routed experts, and what is called more than once for a token.

Slopes are of the block as it is before its matrices are quantized, on what comes of those before
it; one pass through its first matrices and back.

Source: Kim et al., GuidedQuant: Large Language Model Quantization via Exploiting End Loss Guidance,
2025, whose slopes are of the whole model's loss, for all matrices; Sung et al., RSQ: Learning from
Important Tokens Leads to Better Quantized LLMs, 2025, who count tokens by the attention they get.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from qtool.calibrating.linears import Matrix, ObserveLinears, WeightIndex
from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import BlockSites, LinearCall, Site
from qtool.calibrating.stats import Weights
from qtool.calibrating.stream import Call, LoadedBlock, Stream

Squares = Mapping[str, torch.Tensor]  # by parameter of the block: of all tokens, float32


@dataclass(frozen=True)
class Guided:
    """Inputs of a block, those of keys and values apart."""

    sites: tuple[Site, ...]
    weights: Weights  # of mean 1
    parents: dict[str, str]  # by site id: that of the input before


@dataclass(frozen=True)
class Mixing:
    """How tokens meet in a block."""

    read: tuple[Matrix, ...] = ()  # whose outputs later tokens read, in the order of the pass
    behind: Matrix | None = None  # the first that all of these come to; None: the block's output


class _SeenError(Exception):
    """Ends a forward pass of which nothing more is needed."""


@dataclass(frozen=True)
class Guidance:
    """What tokens count in a run, block by block."""

    power: float
    seed: int
    _known: dict[Any, Mixing] = field(default_factory=dict)  # by structure of block

    def squares(self, block: LoadedBlock, passage: Passage) -> Squares:
        """Squared slopes at each token of what other tokens read of; none where torch has no
        gradient."""
        key = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
        if key not in self._known:
            self._known[key] = mixing(block, *passage.stream.probe(block.index))
        how = self._known[key]
        if not how.read:
            return {}
        with passage.placed(block) as (there, stream, workers):
            index = WeightIndex(there.module)

            def one(number: int) -> dict[Matrix, torch.Tensor]:
                return _slopes(there, index, stream, number, how, self._noise(block, number))

            found = workers.map(one, range(len(stream.hidden)))
        every = {matrix: [batch.get(matrix) for batch in found] for matrix in how.read}
        return {
            matrix.parameter: torch.cat([part for part in parts if part is not None])
            for matrix, parts in every.items()
            if not any(part is None for part in parts)
        }

    def _noise(self, block: LoadedBlock, number: int) -> torch.Generator:
        """Of a micro-batch, whichever thread computes it."""
        seed = np.random.SeedSequence([self.seed, block.index, number]).generate_state(1)
        return torch.Generator().manual_seed(int(seed[0]))

    def split(
        self,
        found: BlockSites,
        sites: Sequence[Site],
        squares: Squares,
        batches: Sequence[int],
        together: Sequence[Collection[str]] = (),
    ) -> Guided:
        """Some sites of a block, in the same order, keys and values apart from what else reads
        their input. batches: tokens of each micro-batch. together: checkpoint tensors that are to
        keep one input, as one tensor is made of them."""
        apart: list[Site] = []
        weights: dict[str, Sequence[torch.Tensor]] = {}
        parents: dict[str, str] = {}
        for site in sites:
            calls = [linear for linear in found.linears if linear.site == site.id]
            rest: list[LinearCall] = []
            own: list[tuple[Site, torch.Tensor]] = []
            for group in _groups(calls, together):
                known = [one for one in group if one.matrix.parameter in squares]
                if site.per_token != 1 or site.expert is not None or not known:
                    rest += group
                    continue
                total = sum(squares[one.matrix.parameter] * one.out_features for one in known)
                assert isinstance(total, torch.Tensor)
                counts = self._weights(total)
                if counts is None:
                    rest += group
                else:
                    own.append((_of_calls(site, group), counts))
            if not own:
                rest = []
                apart.append(site)
                parents[site.id] = site.id
            if rest:
                apart.append(_of_calls(site, rest))
                parents[apart[-1].id] = site.id
            for part, counts in own:
                apart.append(part)
                parents[part.id] = site.id
                weights[part.id] = torch.split(counts, list(batches))
        return Guided(tuple(apart), weights, parents)

    def _weights(self, squares: torch.Tensor) -> torch.Tensor | None:
        """By which tokens count, of mean 1; None where slopes say nothing. squares: [tokens]."""
        mean = squares.double().mean()
        if not (torch.isfinite(mean) and mean > 0):
            return None
        found = (squares.double() / mean) ** self.power
        return (found / found.mean()).float()


def guided_note(guides: bool) -> list[str]:
    """What relative errors are of."""
    if not guides:
        return []
    return [
        "in keys and values tokens count by what others read of them (gptq.guided), and so they do "
        "in the relative errors of their outputs"
    ]


def tokens_of(stream: Stream) -> list[int]:
    """Tokens of each micro-batch."""
    return [states.shape[0] * states.shape[1] for states in stream.hidden]


def mixing(block: LoadedBlock, hidden: torch.Tensor, call: Call) -> Mixing:
    """How tokens meet, seen on a small input of one sample; as if they did not where torch has no
    gradient."""
    index, length = WeightIndex(block.module), hidden.shape[1]
    made: dict[Matrix, list[torch.Tensor]] = {}

    def note(matrix: Matrix, output: torch.Tensor, _: Any) -> None:
        if matrix.expert is None:
            made.setdefault(matrix, []).append(output)

    states = hidden.detach().requires_grad_()
    try:
        with torch.enable_grad(), ObserveLinears(index, lambda *_: None, note):
            last = block.outputs(block.module, states.clone(), call)
        once = {matrix: outputs[0] for matrix, outputs in made.items() if len(outputs) == 1}
        whole = {m: o for m, o in once.items() if o.requires_grad and _rows(o) == length}
        read = _read_by_the_last(last.flatten(0, 1), whole)
        order = [*whole]
        behind = order[order.index(read[-1]) + 1 :] if read else []
        for matrix in behind:
            rows = whole[matrix].reshape(length, -1)
            if set(read) <= {*_read_by_the_last(rows, {one: whole[one] for one in read})}:
                return Mixing(tuple(read), matrix)
    except RuntimeError:
        return Mixing()
    return Mixing(tuple(read))


def _rows(output: torch.Tensor) -> int:
    return output.numel() // output.shape[-1]


def _read_by_the_last(rows: torch.Tensor, outputs: Mapping[Matrix, torch.Tensor]) -> list[Matrix]:
    """The matrices on whose outputs at earlier tokens the last of `rows` [tokens, columns]
    depends."""
    noise = torch.randn(rows.shape[-1], generator=torch.Generator().manual_seed(0))
    slopes = torch.autograd.grad(
        rows[-1], [*outputs.values()], noise, retain_graph=True, allow_unused=True
    )
    pairs = zip(outputs, slopes, strict=True)
    return [m for m, one in pairs if one is not None and one.reshape(len(rows), -1)[:-1].any()]


def _slopes(
    block: LoadedBlock,
    index: WeightIndex,
    stream: Stream,
    number: int,
    how: Mixing,
    noise: torch.Generator,
) -> dict[Matrix, torch.Tensor]:
    """Of a micro-batch the mean square of each token's slopes, of matrices that are called once."""
    outputs: dict[Matrix, list[torch.Tensor]] = {}
    ends: list[torch.Tensor] = []

    def note(matrix: Matrix, output: torch.Tensor, _: Any) -> None:
        if matrix == how.behind:
            ends.append(output)
            raise _SeenError
        if matrix in how.read:
            outputs.setdefault(matrix, []).append(output)

    states = stream.hidden[number].detach()
    call = stream.calls[block.index][number]
    try:
        with torch.enable_grad(), ObserveLinears(index, lambda *_: None, note):
            ends.append(block.outputs(block.module, states.requires_grad_().clone(), call))
    except _SeenError:
        pass
    tokens = states.shape[0] * states.shape[1]
    found = {m: o[0] for m, o in outputs.items() if len(o) == 1 and _rows(o[0]) == tokens}
    end = ends[0]
    drawn = torch.randn(end.shape, generator=noise).to(end.device)
    slopes = torch.autograd.grad(end, [*found.values()], drawn, materialize_grads=True)
    return {
        matrix: one.reshape(tokens, -1).square().mean(-1).cpu()
        for matrix, one in zip(found, slopes, strict=True)
    }


def _groups(
    calls: Sequence[LinearCall], together: Sequence[Collection[str]]
) -> list[list[LinearCall]]:
    """Calls on one input, apart but for those that `together` joins, which come where the last of
    them does."""
    groups: list[list[LinearCall]] = []
    for call in calls:
        names = {reader.name for reader in call.readers}
        joined = [names, *(set(some) for some in together if names.intersection(some))]
        every = set[str]().union(*joined)
        near = [g for g in groups if any(r.name in every for one in g for r in one.readers)]
        groups = [g for g in groups if g not in near]
        groups.append([*(one for g in near for one in g), call])
    return groups


def _of_calls(site: Site, calls: Sequence[LinearCall]) -> Site:
    """What some of a site's matrices read."""
    readers = tuple(reader for call in calls for reader in call.readers)
    return replace(site, id=readers[0].name, readers=readers, matrix=calls[0].matrix)
