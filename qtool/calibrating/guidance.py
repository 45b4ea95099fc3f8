"""gptq.guided: in GPTQ's sums a token counts by what an error at it costs the whole network.

    gram = sum over tokens of weight(token) x x'        for each matrix, not for each input
    weight(token) = (g^2 / their mean)^power / the mean of that
    g^2 = mean over what the matrix gives of the squared slopes there: of the log-likelihood of
          tokens drawn from the model's own predictions, as `qtool fit` has them

Plain GPTQ asks for the least squared error, so that a few tokens with inputs a thousand times as
large as others (the first of a text, for most models) decide, though hardly a prediction depends on
what a matrix makes of them. The whole power (1) follows the chances of the drawn tokens, too.

Slopes are measured before the first block, on the model as it is there: one pass forwards and one
backwards, in a folder of their own within the run's, from which a run that dies goes on. Matrices
that read each token once have a weight for it; routed experts, and what else reads other rows, keep
to plain sums.

Source: Kim et al., GuidedQuant: Large Language Model Quantization via Exploiting End Loss Guidance,
2025, which weighs by the whole power, for some rows of a matrix apart.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from errno import EIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.sites import BlockSites, LinearCall, Site
from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.stats import Weights
from qtool.fitting import slopes
from qtool.fitting.sums import Seen
from qtool.native.sums import checksum
from qtool.plan.shapes import micro_batch
from qtool.runs.journal import Journal
from qtool.runs.progress import Progress
from qtool.runs.workspace import Workspace

FOLDER = "guidance"  # within a run's
_ALL = "tokens of all blocks"

ByToken = Mapping[str, NDArray[np.float32]]  # by parameter of the block: squares, [tokens]


@dataclass(frozen=True)
class Guided:
    """Inputs of a block, apart for each matrix whose tokens have weights of their own."""

    sites: tuple[Site, ...]
    weights: Weights  # of mean 1
    parents: dict[str, str]  # by site id: that of the input before


@dataclass(frozen=True)
class Guidance:
    """Squared slopes of all tokens, by block, in files."""

    space: Workspace
    power: float
    tokens: int  # of all samples
    batch: int  # of these in a micro-batch

    @classmethod
    def of(
        cls,
        power: float,
        skeleton: Skeleton,
        tokens: NDArray[np.int64],
        seed: int,
        run: Workspace,
        threads: int,
        progress: Progress,
    ) -> "Guidance":
        """Measured over tokens [samples, length], or found where an earlier run has left it.

        SourceError where something is not finite, UnsupportedError where torch has no gradient.
        """
        folder = run.folder / FOLDER
        folder.mkdir(exist_ok=True)
        found = cls(_space(run, folder), power, tokens.size, micro_batch(*tokens.shape))
        if not found._is_whole(skeleton.count):
            found.space.journal.close()
            shutil.rmtree(folder)
            folder.mkdir()
            found = replace(found, space=_space(run, folder))
        with closing(found.space.journal) as journal:
            if _ALL not in journal.done:
                if not run.journal.done:  # there is something to go on with from now on
                    run.journal.commit(FOLDER)
                progress.say("measuring what errors at each token cost (gptq.guided)")
                slopes.measure(skeleton, tokens, seed, found.space, threads, progress, found._keep)
                journal.commit(_ALL)
        return found

    def _keep(self, index: int, seen: Seen, batches: int) -> None:
        """Of a block, before it counts as measured: of the matrices that each of the micro-batches
        called once, with all of its tokens."""
        known: dict[str, NDArray[np.float32]] = {}
        for matrix, sums in seen.items():
            calls = [one for one in sums.by_token if one is not None]
            once = len(calls) == len(sums.by_token) == batches
            if once and sum(map(len, calls)) == self.tokens:
                known[matrix.parameter] = torch.cat(calls).numpy()
        data = np.stack([*known.values()]) if known else np.empty((0, self.tokens), np.float32)
        self._path(index).write_bytes(data.data if data.size else b"")
        self.space.journal.commit(_unit(index), names=[*known], sum=checksum(data.view(np.uint8)))

    def _is_whole(self, count: int) -> bool:
        """Whether what an earlier run has kept of `count` blocks is there as it was written."""
        done = self.space.journal.done
        kept = [n for n in range(count) if _unit(n) in done]
        return all(self._read(n) is not None for n in kept) and (
            _ALL not in done or len(kept) == count
        )

    def _read(self, index: int) -> ByToken | None:
        """What was kept of a block; None where it is not there, or not whole."""
        entry = self.space.journal.done.get(_unit(index), {})
        names = entry.get("names")
        try:
            data = np.fromfile(self._path(index), np.float32)
        except OSError:
            return None
        if not isinstance(names, list) or checksum(data.view(np.uint8)) != entry.get("sum"):
            return None
        return dict(zip(names, data.reshape(len(names), self.tokens), strict=True))

    def _path(self, index: int) -> Path:
        return self.space.folder / f"tokens-{index}"

    def split(
        self,
        index: int,
        found: BlockSites,
        sites: Sequence[Site],
        together: Sequence[Collection[str]] = (),
    ) -> Guided:
        """Some sites of a block, in the same order, apart by matrix. together: checkpoint tensors
        that are to keep one input, as one tensor is made of them."""
        known = self._read(index)
        if known is None:
            raise OSError(EIO, "what was written reads otherwise", str(self._path(index)))
        apart: list[Site] = []
        weights: dict[str, Sequence[torch.Tensor]] = {}
        parents: dict[str, str] = {}
        for site in sites:
            calls = [linear for linear in found.linears if linear.site == site.id]
            if site.per_token != 1 or site.expert is not None:
                apart.append(site)
                parents[site.id] = site.id
                continue
            for group in _groups(calls, together):
                own = _of_calls(site, group)
                apart.append(own)
                parents[own.id] = site.id
                if all(call.matrix.parameter in known for call in group):
                    squares = sum(known[one.matrix.parameter] * one.out_features for one in group)
                    counts = self._weights(np.asarray(squares, np.float64))
                    weights[own.id] = torch.split(counts, self.batch)
        return Guided(tuple(apart), weights, parents)

    def _weights(self, squares: NDArray[np.float64]) -> torch.Tensor:
        """By which tokens count, of mean 1. squares: [tokens]."""
        mean = squares.mean()
        if not mean > 0:  # nothing depends on what the matrix gives
            return torch.ones(squares.size)
        found = (squares / mean) ** self.power
        return torch.from_numpy((found / found.mean()).astype(np.float32))


def guided_note(power: float) -> list[str]:
    """What relative errors are of."""
    if not power:
        return []
    return [
        "tokens count by what errors at them cost (gptq.guided), and so they do in the relative "
        "errors of outputs"
    ]


def _space(run: Workspace, folder: Path) -> Workspace:
    return Workspace(run.out, folder, Journal(folder / "journal", run.journal.look))


def _unit(index: int) -> str:
    return f"tokens of block {index}"


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
