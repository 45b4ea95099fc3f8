"""Hidden states of the unquantized model beside those of the quantized one, where blocks are tuned
to give back what they gave."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtool.calibrating.hidden import OnDisk, keep, put, whole
from qtool.calibrating.placed import Passage
from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.stream import LoadedBlock, States
from qtool.calibrating.tune_block import Kind, Tuned, tune_block
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
    options: TuneOptions

    @classmethod
    def of(
        cls, skeleton: Skeleton, passage: Passage, folder: Path, options: TuneOptions
    ) -> "Originals":
        """Before the first block, where both are the same. folder: of the run."""
        stream, own = passage.stream, folder / FOLDER
        own.mkdir(exist_ok=True)
        hidden: States = list(stream.hidden)
        if isinstance(stream.hidden, OnDisk):
            hidden = OnDisk(own)
            for states in stream.hidden:
                hidden.append(states)
        original = replace(passage, stream=replace(stream, hidden=hidden))
        return cls(skeleton, passage, original, own, options)

    def advance(self, block: LoadedBlock) -> None:
        """The original's states go through a block whose matrices are not rounded yet."""
        with self.original.placed(block) as (there, stream, workers):
            self.skeleton.advance(there, stream, workers)

    def tune(self, block: LoadedBlock, matrices: Mapping[str, Kind]) -> Tuned[Kind]:
        """Move the scales of a block's matrices, and its weights with them; see tune_block."""
        targets = self.original.stream.hidden
        stream, workers = self.quantized.stream, self.quantized.workers
        return tune_block(block, matrices, stream, targets, workers, self.options)

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
