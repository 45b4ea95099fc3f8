"""Going on with a GGUF file that an earlier run began: what of it is finished, and what is not.

A unit of work is a tensor, of a large one a part: a table of words is larger than a decoder block,
and no more than that is to be done again. What is said to be written is read back and compared
before it is believed.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from qtool.checkpoints.gguf_models import source_files
from qtool.formats.gguf_writer import GgufWriter, Layout
from qtool.gguf.pieces import Done, Pieces
from qtool.gguf.source import GgufSource
from qtool.planning.gguf.planned import GgufPlan
from qtool.provenance.record import environment
from qtool.recipe.gguf import GgufRecipe
from qtool.runs.gguf_verify import Reader
from qtool.runs.zeros import Zeros
from qtool.streaming.in_order import in_order
from qtool.workspaces import program
from qtool.workspaces.differences import DEVICE, HEADER
from qtool.workspaces.identity import file_facts
from qtool.workspaces.journal import Journal

UNIT_PIECES = 64  # at most, of 2^18 weights each


def facts(
    recipe: GgufRecipe, source: GgufSource, imatrix: Path | None, gpu: str | None = None
) -> dict[str, Any]:
    """What makes it the same run, by the names that a person knows it by. gpu: that sweeps, if not
    the CPU; other recipes may be finished on either."""
    found: dict[str, Any] = {
        **program.facts(),
        "recipe": {"name": recipe.name, **recipe.effective()},
        "source": [file_facts(file) for file in source_files(source.path)],
    }
    if recipe.rotates:  # importance is agreed on where it is measured
        found["version of torch or kind of CPU"] = environment()
    if recipe.sweeps:
        found[DEVICE] = gpu or "cpu"
    if imatrix is not None:
        found["importance matrix"] = file_facts(imatrix)
    return found


def header_fact(plan: GgufPlan) -> dict[str, str]:
    """Keys, tensors and their places: what the plan came to."""
    return {HEADER: hashlib.sha256(plan.layout.header).hexdigest()}


@dataclass(frozen=True)
class Unit:
    """Pieces of one tensor that are committed together."""

    name: str  # in the journal
    tensor: int
    pieces: slice


def units(pieces: Pieces, layout: Layout) -> list[Unit]:
    """All units of a file, in its order."""
    found = []
    for tensor, spec in enumerate(layout.tensors):
        whole = pieces.of(tensor)
        starts = range(whole.start, whole.stop, UNIT_PIECES)
        for number, start in enumerate(starts):
            part = slice(start, min(start + UNIT_PIECES, whole.stop))
            # Tabs come in no tensor's name of a GGUF file that an engine loads.
            name = spec.name if len(starts) == 1 else f"{spec.name}\t{number}"
            found.append(Unit(name, tensor, part))
    return found


def take_up(
    descriptor: int,
    pieces: Pieces,
    done: Done,
    writer: GgufWriter,
    journal: Journal,
    threads: int,
) -> list[int]:
    """The pieces that are still to be made; the others are in `done`, and in the writer."""
    every = units(pieces, writer.layout)
    good = {
        number: True
        for number, unit in enumerate(every)
        if (entry := journal.done.get(unit.name)) is not None
        and done.put(unit.pieces, entry.get("pieces"))
    }
    numbers = [(place, n) for place in good for n in _numbers(every[place])]

    def worker() -> Callable[[int], None]:
        reader = Reader(descriptor, writer.layout, pieces, done)

        def look(number: int) -> None:
            place, piece = numbers[number]
            if not reader.same(piece):
                good[place] = False

        return look

    in_order(len(numbers), threads, worker, range)
    left: list[int] = []
    for place, unit in enumerate(every):
        if good.get(place):
            first, last = pieces[unit.pieces.start].first, pieces[unit.pieces.stop - 1].last
            writer.restored(unit.tensor, first, last)
        else:
            left += _numbers(unit)
    return left


def _numbers(unit: Unit) -> range:
    return range(unit.pieces.start, unit.pieces.stop)


class Commits:
    """Counts the finished pieces of each unit; a line goes into the journal with its last."""

    def __init__(self, pieces: Pieces, done: Done, writer: GgufWriter, journal: Journal,
                 zeros: Zeros | None = None) -> None:  # fmt: skip
        """zeros: is shown what is read, where that is not what is encoded."""
        self._done, self._journal, self._zeros = done, journal, zeros
        self._units = units(pieces, writer.layout)
        self._starts = [unit.pieces.start for unit in self._units]
        self._left: dict[int, int] = {}
        self._lock = Lock()

    def __call__(self, number: int) -> None:
        """A piece is written."""
        place = bisect_right(self._starts, number) - 1
        unit = self._units[place]
        with self._lock:
            left = self._left.get(place, len(_numbers(unit))) - 1
            self._left[place] = left
        if not left:
            del self._left[place]
            seen = {} if self._zeros is None else {"zeros": self._zeros.seen}
            self._journal.commit(unit.name, pieces=self._done.of(unit.pieces), **seen)
