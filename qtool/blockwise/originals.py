"""Hidden states of the unquantized model beside those of the quantized one, where blocks are to
give back what they gave: matrices compensate for what was lost (gptq.gptaq), or scales are
tuned."""

import statistics
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.blockwise.tune_block import Kind, Tuned, tune_block
from qtool.calibrating.pairs import Pair, collect_pair
from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats
from qtool.messages.summary import TunedReport
from qtool.methods import gptaq, named
from qtool.recipe.methods import TuneOptions
from qtool.streaming.hidden import OnDisk, keep, put, whole
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import InMemory, LoadedBlock, States

FOLDER = "originals"  # within a run's


@dataclass(frozen=True)
class Compensated:
    """What is known of a site once its matrices compensate for what it has lost."""

    count: int  # tokens
    gram: NDArray[np.float32]  # [in, in]
    there: torch.Tensor | None  # the same on the device
    notes: tuple[str, ...]

    def added_to(self, stats: SiteStats) -> SiteStats:
        """With what else was measured."""
        return replace(stats, count=self.count, gram=self.gram, there=self.there)


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
        hidden: States = OnDisk(own) if isinstance(stream.hidden, OnDisk) else InMemory()
        for states in stream.hidden:
            hidden.append(states)
        original = replace(passage, stream=replace(stream, hidden=hidden))
        return cls(skeleton, passage, original, own)

    def advance(self, block: LoadedBlock) -> None:
        """The original's states go through a block whose matrices are not rounded yet."""
        with self.original.placed(block) as (there, stream, workers):
            self.skeleton.advance(there, stream, workers)

    def compensate(
        self, block: LoadedBlock, before: LoadedBlock, site: Site, names: Container[str],
        part: float, counts: Sequence[torch.Tensor] | None = None,
    ) -> Compensated:  # fmt: skip
        """The matrices of these names that read a site go `part` of the way to what compensates for
        what it has lost; see qtool.methods.gptaq.

        block: whose matrices are rounded as far as the site. before: a copy, none of them rounded.
        counts: of each micro-batch how much a token counts.
        """
        pair = self._pair(block, before, site, counts)
        device, spread = self.quantized.device, self.quantized.workers.spread
        gram = pair.gram.cpu().numpy()
        weights = {
            name: np.ascontiguousarray(block.weights[name].numpy())
            for name in site.names
            if name in names and name in block.weights
        }
        where = f"the input of {site.names[0]}"
        with ExitStack() as stack, named(where):
            if device is not None:
                stack.enter_context(device.alone)
                stack.enter_context(device.explained())
            rows = sum(map(len, weights.values()))
            step = gptaq.step_of(pair.gram, pair.cross, rows, device is not None, spread)
            for name, weight in weights.items():
                moved = gptaq.moved(weight, step, part, spread)
                block.weights[name].copy_(torch.from_numpy(moved))
        there = None if device is None else pair.gram
        notes = tuple(f"{where}: what it lost: {note}" for note in step.notes)
        return Compensated(pair.count, gram, there, notes)

    def _pair(
        self,
        block: LoadedBlock,
        before: LoadedBlock,
        site: Site,
        counts: Sequence[torch.Tensor] | None,
    ) -> Pair:
        """The device has both blocks while this lasts."""
        with (
            self.quantized.placed(block) as (there, stream, workers),
            self.original.placed(before) as (other, originals, _),
        ):
            return collect_pair(there, stream, other, originals, site, workers, counts)

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
        f"scales of {nearer} of {len(ratios)} blocks were tuned; relative squared error of their "
        "outputs, token by token, on samples that took no part, against what it was: median "
        f"{statistics.median(ratios):.3f}, least {min(ratios):.3f}. Errors of single layers are "
        "those before it"
    ]


def gptaq_note(part: float) -> list[str]:
    """What relative errors are of."""
    if not part:
        return []
    return [
        f"matrices compensate for {part:.0%} of what rounding before them has lost (gptq.gptaq); "
        "relative errors are from what they were moved to, not from the source"
    ]
