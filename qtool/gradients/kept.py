"""What of a measurement is finished, in the hidden folder of a run, so that one that dies goes on.

    states-N                hidden states before block N, of the forward pass
    gradients-0, -1         gradients by what enters the block that was passed last, in turns
    sensitivity-N           of block N, or of the head where N is how many there are
    given-N                 gradients by what block N is given for itself, if it is: float32
    sensitivity-tables      the last: of tables. States and gradients are gone then

The journal has checksums of all. A unit that is done again has another line there, and the last one
counts: what it says is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtool.gradients import sensitivity_file
from qtool.gradients.passing import Passing
from qtool.gradients.sensitivity import Sensitivity
from qtool.gradients.sensitivity_file import Named
from qtool.native.sums import checksum
from qtool.streaming.workers import Workers
from qtool.workspaces.workspace import Workspace


@dataclass(frozen=True)
class Block:
    """What was found of a block, or of the head."""

    named: Named
    unrelated: float | None = None  # of the head: see Sensitivities
    # Of the gradients by what the block is given for itself, by micro-batch.
    given: list[list[list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class Kept:
    """Of one run."""

    space: Workspace
    states: Passing  # of the forward pass
    workers: Workers

    def keep_states(self, index: int) -> None:
        """Those that are passing are the ones before block `index`, and lie in their place."""
        if self.space.journal.done.get(_forwards(index), {}).get("states") != self.states.sums:
            self.space.journal.commit(_forwards(index), states=self.states.sums)

    def take_states(self, index: int) -> bool:
        """Let those before block `index` pass, if they are there and whole."""
        entry = self.space.journal.done.get(_forwards(index), {})
        return self.states.take(states_at(self.space, index), entry.get("states"), self.workers)

    def keep_sensitivities(
        self,
        index: int,
        named: Named,
        gradients: Passing,
        given: list[list[torch.Tensor]],
        unrelated: float | None = None,
    ) -> Block:
        """Of a block, with the gradients by what enters it, which lie in their place, and by what
        it is given for itself, which stay on the disk."""
        entry = sensitivity_file.write(_sensitivities(self.space, index), named)
        each = [tensor.numpy().reshape(-1) for batch in given for tensor in batch]
        by_given = np.concatenate([np.empty(0, np.float32), *each])
        if each:
            self._given(index).write_bytes(by_given.view(np.uint8).data)
        shapes = [[list(tensor.shape) for tensor in batch] for batch in given]
        found = Block(named, unrelated, shapes)
        self.space.journal.commit(
            _backwards(index),
            **entry,
            given=found.given,
            given_sums=checksum(by_given.view(np.uint8)),
            gradients=gradients.sums,
            unrelated=unrelated,
        )
        states_at(self.space, index).unlink(missing_ok=True)  # needed no more
        return found

    def read_given(self, index: int, found: Block, number: int) -> list[torch.Tensor]:
        """Gradients by what block `index` is given for itself, of a micro-batch."""
        if not found.given or not found.given[number]:
            return []
        sizes = [sum(map(prod, batch)) for batch in found.given]
        start, size = 4 * sum(sizes[:number]), sizes[number]
        numbers = np.fromfile(self._given(index), np.float32, size, offset=start)
        parts = torch.from_numpy(numbers).split_with_sizes([*map(prod, found.given[number])])
        shapes = found.given[number]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _given(self, index: int) -> Path:
        return self.space.folder / f"given-{index}"

    def take_sensitivities(self, index: int) -> Block | None:
        """None where they are not there, or not whole."""
        entry = self.space.journal.done.get(_backwards(index), {})
        named = sensitivity_file.read(_sensitivities(self.space, index), entry)
        given = None if named is None else self._take_given(index, entry)
        if named is None or given is None:
            return None
        return Block(named, _number(entry.get("unrelated")), given)

    def _take_given(self, index: int, entry: Mapping[str, Any]) -> list[list[list[int]]] | None:
        """Their shapes; None where they are not there, or not whole."""
        shapes = entry.get("given")
        if not isinstance(shapes, list):
            return None
        try:
            size = sum(prod(shape) for batch in shapes for shape in batch)
            numbers = np.fromfile(self._given(index), np.float32) if size else np.empty(0, np.uint8)
        except (OSError, TypeError):  # not what keep_sensitivities() writes
            return None
        whole = checksum(numbers.view(np.uint8)) == entry.get("given_sums")
        return shapes if whole and (numbers.size == size) else None

    def take_gradients(self, index: int) -> Passing | None:
        """Those by what enters block `index`, if they are there and whole."""
        entry: Mapping[str, Any] = self.space.journal.done.get(_backwards(index), {})
        path = gradients_at(self.space, index)
        found = self.states.alike(path)
        return found if found.take(path, entry.get("gradients"), self.workers) else None


def states_at(space: Workspace, index: int) -> Path:
    """Where hidden states before block `index` lie."""
    return space.folder / f"states-{index}"


def gradients_at(space: Workspace, index: int) -> Path:
    """Where gradients by what enters block `index` lie."""
    return space.folder / f"gradients-{index % 2}"


def keep_all(space: Workspace, blocks: int, tables: Mapping[str, Sensitivity]) -> None:
    """Sensitivities of all blocks and the head are there, and these of tables: what led to them
    goes."""
    entry = sensitivity_file.write(
        _sensitivities(space, _TABLES), [(name, -1, one) for name, one in tables.items()]
    )
    space.journal.commit(_ALL, blocks=blocks, **entry)
    drop_passed(space)


def take_all(space: Workspace) -> tuple[list[Block], dict[str, Sensitivity]] | None:
    """Of the head, and of the blocks from the last to the first; and of tables. None where an
    earlier run has not found all, or not all is whole."""
    last: Mapping[str, Any] = space.journal.done.get(_ALL, {})
    count = last.get("blocks")
    if type(count) is not int:
        return None
    tables = sensitivity_file.read(_sensitivities(space, _TABLES), last)
    found: list[Block] = []
    for index in range(count, -1, -1):
        entry = space.journal.done.get(_backwards(index), {})
        named = sensitivity_file.read(_sensitivities(space, index), entry)
        if named is None:
            return None
        found.append(Block(named, _number(entry.get("unrelated"))))
    if tables is None:
        return None
    drop_passed(space)  # where it was killed before
    return found, {name: one for name, _, one in tables}


def drop_passed(space: Workspace) -> None:
    """Remove what only the passes through the blocks need."""
    for kind in ("states-*", "gradients-*", "given-*", "arguments*"):
        for path in space.folder.glob(kind):
            path.unlink(missing_ok=True)


def _sensitivities(space: Workspace, index: int | str) -> Path:
    return space.folder / f"sensitivity-{index}"


def _number(value: Any) -> float | None:
    return value if type(value) is float else None


_TABLES = "tables"
_ALL = "sensitivities of tables, the last"


def _forwards(index: int) -> str:
    return f"states before block {index}"


def _backwards(index: int) -> str:
    return f"sensitivities of block {index}"
