"""States between two blocks as one tensor, [samples, length, columns] float32, whatever they are.

Most models hand hidden states from block to block and nothing else. Some have several streams of
them, and some hand on more: keys and values that later blocks attend to, positions that they choose
from, what a router has seen. Each has numbers for every position, which lie in columns behind the
hidden states:

    hidden states | first value | second value | ...

So whatever keeps states, moves them or backpropagates through them needs to know of no kind of
model, and the first positions of a text are the first rows of all that is handed on.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from qtool.errors import UnsupportedError


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """From the disk."""
        found = torch.empty(self.shape, dtype=self.dtype)
        view = memoryview(found.view(-1).view(torch.uint8).numpy().data)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while view and (got := file.readinto(view)):
                view = view[got:]
        if view:
            raise OSError(f"{self.path}: ends before what was written to it")
        return found


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A call's argument with each leaf of its tuples, lists and dicts changed.

    An empty dict is a leaf: it may be what blocks have in common.
    """
    if isinstance(value, tuple | list):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict) and value:
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


@dataclass(frozen=True)
class Returned:
    """Stands in a block's arguments for what the block before returned beside its hidden states."""

    number: int  # its place in the tuple


@dataclass(frozen=True)
class Common:
    """Stands in a block's arguments for a mapping that all blocks have in common."""

    kind: type  # makes an empty one


@dataclass(frozen=True)
class Beside:
    """A tensor [samples, length, columns] that each block returns and the next one is given."""

    number: int  # its place in the tuple
    columns: int

    def read(self, part: torch.Tensor) -> torch.Tensor:
        """As a block has it."""
        return part

    def written(self, value: torch.Tensor) -> torch.Tensor:
        """As states have it."""
        return value


@dataclass(frozen=True)
class Positions(Beside):
    """The same of integers: different positions in any order, and -1, which is none.

    A block may return nothing where the next one needs nothing of it.
    """

    def read(self, part: torch.Tensor) -> torch.Tensor:
        """As a block has it."""
        # What lies behind the beginning of a text is masked in all of it.
        return part.long().clamp(max=part.shape[1] - 1)

    def written(self, value: torch.Tensor) -> torch.Tensor:
        """As states have it: none first, and the last one again where there are few."""
        found = value.sort(-1).values.to(torch.float32)[..., -self.columns :]
        again = found[..., -1:].expand(*found.shape[:2], self.columns - found.shape[-1])
        return torch.cat([found, again], dim=-1)


@dataclass(frozen=True)
class Entry:
    """A tensor [samples, heads, length, size] in the mapping that blocks have in common."""

    key: Any
    number: int  # its place in the tuple that the key stands for
    heads: int
    size: int

    @property
    def columns(self) -> int:
        """Numbers of a position."""
        return self.heads * self.size

    def read(self, part: torch.Tensor) -> torch.Tensor:
        """As a block has it."""
        return part.reshape(*part.shape[:2], self.heads, self.size).transpose(1, 2)

    def written(self, value: torch.Tensor) -> torch.Tensor:
        """As states have it."""
        return value.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Given:
    """States as a block is called with them."""

    hidden: torch.Tensor
    returned: Mapping[int, torch.Tensor]  # by their place in the tuple
    common: MutableMapping[Any, Any] | None

    def put(self, argument: Any) -> Any:
        """What an argument of the recorded call stands for."""
        if isinstance(argument, Returned):
            return self.returned[argument.number]
        if isinstance(argument, Stored):
            return argument.read()
        return self.common if isinstance(argument, Common) else argument


@dataclass(frozen=True)
class Layout:
    """What lies where in the columns."""

    shape: tuple[int, ...]  # of the hidden states of a position: (width,) or (streams, width)
    streams_first: bool = False  # before the samples, as the model has them
    values: tuple[Beside | Entry, ...] = ()
    common: type | None = None  # of the mapping, where blocks have one

    @property
    def plain(self) -> bool:
        """Whether states are hidden states, as they are."""
        return len(self.shape) == 1 and not self.values

    @property
    def columns(self) -> int:
        """Of the hidden states."""
        return int(torch.Size(self.shape).numel())

    def hidden(self, states: torch.Tensor) -> torch.Tensor:
        """Of these columns; without a copy."""
        return states[..., : self.columns]

    def parts(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Hidden states and values, each of its own magnitude."""
        return list(states.split_with_sizes([self.columns, *(v.columns for v in self.values)], -1))

    def as_model(self, states: torch.Tensor) -> torch.Tensor:
        """The hidden states in the model's own shape."""
        hidden = self.hidden(states)
        if len(self.shape) == 1:
            return hidden
        hidden = hidden.reshape(*hidden.shape[:2], *self.shape)
        return hidden.movedim(2, 0) if self.streams_first else hidden

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """States before the first block, which is given nothing but hidden states."""
        found = self._flat(hidden.to(torch.float32))
        return F.pad(found, (0, sum(value.columns for value in self.values)))

    def given(self, states: torch.Tensor) -> Given:
        """What a block is called with."""
        returned: dict[int, torch.Tensor] = {}
        entries: dict[Any, list[torch.Tensor]] = {}
        for value, part in zip(self.values, self.parts(states)[1:], strict=True):
            if isinstance(value, Beside):
                returned[value.number] = value.read(part)
            else:
                entries.setdefault(value.key, []).append(value.read(part))
        common = None if self.common is None else self.common()
        if common is not None:
            common.update({key: tuple(tensors) for key, tensors in entries.items()})
        return Given(self.as_model(states), returned, common)

    def after(self, states: torch.Tensor, given: Given, output: Any, where: str) -> torch.Tensor:
        """States behind a block that made `output` of what it was given.

        UnsupportedError where it returns or keeps something else than is known of it.
        """
        results = output if isinstance(output, tuple) else (output,)
        hidden = results[0]
        if not isinstance(hidden, torch.Tensor) or hidden.shape != given.hidden.shape:
            raise UnsupportedError(f"{where} returns other hidden states than the ones it is given")
        known = {value.key for value in self.values if isinstance(value, Entry)}
        for key in (given.common or {}).keys() - known:
            raise UnsupportedError(f"{where} keeps something for later blocks under {key!r}")
        if self.plain:
            return hidden
        found = [self._flat(hidden)]
        for value in self.values:
            taken = _taken(value, results, given)
            if taken is None and isinstance(value, Positions):
                taken = given.returned[value.number]
            if taken is None:
                raise UnsupportedError(f"{where} does not hand on what later blocks are given")
            columns = value.written(taken)
            if columns.shape != (*states.shape[:2], value.columns):
                raise UnsupportedError(
                    f"{where} hands on {list(columns.shape)} numbers, not {value.columns} for each "
                    "position"
                )
            found.append(columns)
        return torch.cat(found, dim=-1)

    def _flat(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the model as columns."""
        if len(self.shape) == 1:
            return hidden
        return (hidden.movedim(0, 2) if self.streams_first else hidden).flatten(2)


def _taken(value: Beside | Entry, results: Sequence[Any], given: Given) -> torch.Tensor | None:
    """A value as the block left it."""
    found = None
    if isinstance(value, Entry) and given.common is not None:
        found = given.common[value.key][value.number]
    elif isinstance(value, Beside) and value.number < len(results):
        found = results[value.number]
    return found if isinstance(found, torch.Tensor) else None
