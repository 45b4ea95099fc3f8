"""Hidden states of the unquantized model beside those of the quantized one, where blocks are to
give back what they gave: matrices make up for what was lost (gptq.gptaq), or scales are tuned."""

import statistics
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtool.calibrating.hidden import OnDisk, keep, put, whole
from qtool.calibrating.pairs import Pair, collect_pairs
from qtool.calibrating.placed import Passage, passed
from qtool.calibrating.sites import Site, groups_of
from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.stream import LoadedBlock, States
from qtool.calibrating.tune_block import Kind, Tuned, tune_block
from qtool.methods import gptaq, named
from qtool.plan.shapes import pair_sum_bytes
from qtool.recipe.methods import TuneOptions
from qtool.runs.summary import TunedReport

FOLDER = "originals"  # within a run's


@dataclass(frozen=True)
class Originals:
    """One text on its way through a model twice."""

    skeleton: Skeleton
    quantized: Passage  # of the run
    original: Passage  # through blocks as they are in the source
    folder: Path

    @classmethod
    def of(cls, skeleton: Skeleton, passage: Passage, folder: Path) -> "Originals":
        """Before the first block, where both are the same. folder: of the run."""
        stream, own = passage.stream, folder / FOLDER
        own.mkdir(exist_ok=True)
        hidden: States = list(stream.hidden)
        if isinstance(stream.hidden, OnDisk):
            hidden = OnDisk(own)
            for states in stream.hidden:
                hidden.append(states)
        original = replace(passage, stream=replace(stream, hidden=hidden))
        return cls(skeleton, passage, original, own)

    def pass_by(
        self,
        block: LoadedBlock,
        sites: Sequence[Site],
        names: Container[str],
        part: float,
        room: int,
    ) -> None:
        """The original's states go through a block whose matrices are not rounded yet. Then those
        of these names go `part` of the way to what makes up for what the inputs of these sites
        have lost; see qtool.methods.gptaq. room: bytes for sums."""
        if part:
            self._make_up(block, sites, names, part, room)
            return
        with self.original.placed(block) as (there, stream, workers):
            self.skeleton.advance(there, stream, workers)

    def _make_up(
        self,
        block: LoadedBlock,
        sites: Sequence[Site],
        names: Container[str],
        part: float,
        room: int,
    ) -> None:
        found: dict[str, torch.Tensor] = {}
        compared = [site for site in sites if site.per_token is not None]
        for group in (groups := groups_of(compared, room, pair_sum_bytes)):
            pairs = self._pairs(block, group, advance=group is groups[-1])
            work = partial(self._moved, block=block, names=names, pairs=pairs, part=part)
            for some in self.quantized.workers.map(work, group):
                found |= some
        for name, weight in found.items():
            block.weights[name].copy_(weight)

    def _pairs(self, block: LoadedBlock, sites: Sequence[Site], advance: bool) -> dict[str, Pair]:
        device, calls = self.original.device, self.original.calls
        with self.quantized.placed(block) as (there, stream, workers), ExitStack() as stack:
            states = self.original.stream.hidden
            if device is not None and calls is not None:
                states = stack.enter_context(passed(device, calls, self.original.stream))[0].hidden
            return collect_pairs(there, stream, states, sites, workers, advance)

    def _moved(
        self,
        site: Site,
        block: LoadedBlock,
        names: Container[str],
        pairs: dict[str, Pair],
        part: float,
    ) -> dict[str, torch.Tensor]:
        """Matrices that read one site. Takes its pair, which is large."""
        pair = pairs.pop(site.id)
        weights = {
            name: np.ascontiguousarray(block.weights[name].numpy())
            for name in site.names
            if name in names and name in block.weights
        }
        device = self.quantized.device
        with ExitStack() as stack, named(f"the input of {site.names[0]}"):
            if device is not None:
                stack.enter_context(device.alone)
                stack.enter_context(device.explained())
            rows, spread = sum(map(len, weights.values())), self.quantized.workers.spread
            step = gptaq.step_of(pair.gram, pair.cross, rows, spread)
            del pair
            return {
                name: torch.from_numpy(gptaq.moved(weight, step, part, spread))
                for name, weight in weights.items()
            }

    def tune(
        self, block: LoadedBlock, matrices: Mapping[str, Kind], options: TuneOptions
    ) -> Tuned[Kind]:
        """Move the scales of a block's matrices, and its weights with them; see tune_block."""
        targets = self.original.stream.hidden
        stream, workers = self.quantized.stream, self.quantized.workers
        return tune_block(block, matrices, stream, targets, workers, options)

    def keep(self, index: int) -> list[int]:
        """Write the original's states before block `index`; the checksum of each micro-batch."""
        return keep(self.folder, index, self.original.stream, self.original.workers)

    def take_up(self, folder: Path, index: int, kept: Any) -> bool:
        """Put the states of both before block `index` in place, if both are there as `kept` says,
        those of the quantized model in the run's folder first; else both stay."""
        if not isinstance(kept, list):
            return False
        half = len(kept) // 2
        sides = (
            (folder, kept[:half], self.quantized),
            (self.folder, kept[half:], self.original),
        )
        if not all(whole(at, index, sums, by.stream, by.workers) for at, sums, by in sides):
            return False
        return all(put(at, index, sums, by.stream) for at, sums, by in sides)


def tuned_note(reports: Sequence[TunedReport]) -> list[str]:
    """One sentence on what tuning gained."""
    if not reports:
        return []
    ratios = [one.after / one.before if one.before > 0 else 1.0 for one in reports]
    nearer = sum(ratio < 1 for ratio in ratios)
    return [
        f"scales of {nearer} of {len(ratios)} blocks were tuned; squared error of their outputs on "
        f"samples that took no part, against what it was: median {statistics.median(ratios):.3f}, "
        f"least {min(ratios):.3f}. Errors of single layers are those before it"
    ]
