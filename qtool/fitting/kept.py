"""What of a measurement is finished, in the hidden folder of a run, so that one that dies goes on.

    states/N/hidden-0       hidden states before block N, of the pass forwards
    gradients/hidden-0, -1  gradients by what enters the block that was passed last, in turns
    slopes-N                of block N, or of the head where N is how many there are: float64
given-N                 gradients by what block N is given for itself, if it is: float32

The journal has checksums of all, and to which matrices the numbers of a file belong. A unit that is
done again has another line there, and the last one counts: what it says is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from shutil import rmtree
from typing import Any

import numpy as np
import torch

from qtool.calibrating.hidden import keep, put, whole
from qtool.calibrating.stream import Stream
from qtool.calibrating.workers import Workers
from qtool.fitting.slope import Slope
from qtool.native.sums import checksum
from qtool.runs.workspace import Workspace

Named = list[tuple[str, int, Slope]]  # a checkpoint tensor, an expert's number or -1, and its slope


@dataclass(frozen=True)
class Block:
    """What was found of a block, or of the head."""

    named: Named
    given: list[list[torch.Tensor]] = field(default_factory=list)  # by micro-batch


@dataclass(frozen=True)
class Kept:
    """Of one run."""

    space: Workspace
    stream: Stream
    workers: Workers

    def keep_states(self, index: int) -> None:
        """Those that the stream has are the ones before block `index`."""
        place = self.space.folder / "states" / str(index)
        place.mkdir(parents=True, exist_ok=True)
        sums = keep(place, 0, self.stream, self.workers)
        self.space.journal.commit(_forwards(index), hidden=sums)

    def take_states(self, index: int) -> bool:
        """Put those before block `index` into the stream, if they are there and whole."""
        entry = self.space.journal.done.get(_forwards(index))
        if entry is None:
            return False
        place, sums = self.space.folder / "states" / str(index), entry.get("hidden")
        if not whole(place, 0, sums, self.stream, self.workers):
            return False
        return put(place, 0, list(sums or ()), self.stream)

    def keep_slopes(self, index: int, found: Block, gradients: list[torch.Tensor]) -> None:
        """Of a block, with the gradients by what enters it."""
        parts = [part for _, _, one in found.named for part in (one.rows, one.columns)]
        numbers = np.concatenate([np.empty(0), *parts])
        raw = numbers.view(np.uint8)
        (self.space.folder / f"slopes-{index}").write_bytes(raw.data)
        each = [tensor for batch in found.given for tensor in batch]
        given = np.concatenate([np.empty(0, np.float32), *(t.numpy().reshape(-1) for t in each)])
        if each:
            (self.space.folder / f"given-{index}").write_bytes(given.view(np.uint8).data)
        folder = self.space.folder / "gradients"
        folder.mkdir(exist_ok=True)
        sums = keep(folder, index, replace(self.stream, hidden=gradients), self.workers)
        self.space.journal.commit(
            _backwards(index),
            matrices=[[n, e, s.count, s.rows.size, s.columns.size] for n, e, s in found.named],
            sums=checksum(raw),
            given=[[list(tensor.shape) for tensor in batch] for batch in found.given],
            given_sums=checksum(given.view(np.uint8)),
            gradients=sums,
        )
        rmtree(self.space.folder / "states" / str(index), ignore_errors=True)  # needed no more

    def take_slopes(self, index: int) -> Block | None:
        """None where they are not there, or not whole."""
        entry = self.space.journal.done.get(_backwards(index))
        path = self.space.folder / f"slopes-{index}"
        if entry is None or not path.is_file():
            return None
        numbers = np.fromfile(path, np.float64)
        shapes = _shapes(entry)
        sizes = [size for _, _, _, *pair in shapes or () for size in pair]
        if shapes is None or numbers.size != sum(sizes):
            return None
        if checksum(numbers.view(np.uint8)) != entry.get("sums"):
            return None
        given = self._take_given(index, entry)
        if given is None:
            return None
        parts = iter(np.split(numbers, np.cumsum(sizes)[:-1]) if sizes else ())
        named = [(n, e, Slope(next(parts), next(parts), count)) for n, e, count, _, _ in shapes]
        return Block(named, given)

    def _take_given(self, index: int, entry: Mapping[str, Any]) -> list[list[torch.Tensor]] | None:
        """None where they are not there, or not whole."""
        shapes = entry.get("given")
        path = self.space.folder / f"given-{index}"
        if not isinstance(shapes, list):
            return None
        try:
            sizes = [int(np.prod(shape)) for batch in shapes for shape in batch]
            numbers = np.fromfile(path, np.float32) if sizes else np.empty(0, np.float32)
            if checksum(numbers.view(np.uint8)) != entry.get("given_sums"):
                return None
            parts = iter(torch.from_numpy(numbers).split_with_sizes(sizes) if sizes else ())
            return [[next(parts).reshape(shape) for shape in batch] for batch in shapes]
        except (OSError, TypeError, ValueError, RuntimeError):  # not what keep_slopes() writes
            return None

    def take_gradients(self, index: int) -> list[torch.Tensor] | None:
        """Those by what enters block `index`, if they are there and whole."""
        entry: Mapping[str, Any] = self.space.journal.done.get(_backwards(index), {})
        folder, sums = self.space.folder / "gradients", entry.get("gradients")
        found: list[torch.Tensor] = list(self.stream.hidden)
        stream = replace(self.stream, hidden=found)
        if not whole(folder, index, sums, stream, self.workers):
            return None
        put(folder, index, list(sums or ()), stream)
        return found


def _forwards(index: int) -> str:
    return f"states before block {index}"


def _backwards(index: int) -> str:
    return f"slopes of block {index}"


def _shapes(entry: Mapping[str, Any]) -> list[Any] | None:
    """What keep_slopes() wrote of the matrices; None of a line that it never wrote."""
    found = entry.get("matrices")
    good = isinstance(found, list) and all(
        isinstance(one, list)
        and len(one) == 5
        and isinstance(one[0], str)
        and type(one[1]) is int
        and all(type(number) is int and number >= 0 for number in one[2:])
        for one in found
    )
    return found if isinstance(found, list) and good else None
