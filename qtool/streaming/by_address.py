"""What is known of matrices, found again at the calls that multiply by them."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

import torch

Known = TypeVar("Known")


@dataclass(frozen=True)
class _Place(Generic[Known]):
    start: int
    end: int  # behind its last number
    known: Known


@dataclass(frozen=True)
class ByAddress(Generic[Known]):
    """Of tensors in memory: rows of one are known as the whole is."""

    _places: tuple[_Place[Known], ...] = ()  # in the order of their starts
    _starts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, tensors: Iterable[tuple[torch.Tensor, Known]]) -> "ByAddress[Known]":
        """Of tensors that stay where they are."""
        every = (_Place(t.data_ptr(), t.data_ptr() + _extent(t), known) for t, known in tensors)
        places = tuple(sorted(every, key=attrgetter("start")))
        return cls(places, [place.start for place in places])

    def __bool__(self) -> bool:
        return bool(self._places)

    def find(self, weight: torch.Tensor) -> Known | None:
        """Of a tensor, or of a part of one."""
        at = bisect_right(self._starts, weight.data_ptr()) - 1
        if at < 0 or weight.data_ptr() >= self._places[at].end:
            return None
        return self._places[at].known


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first number to behind its last."""
    if tensor.numel() == 0:
        return 0
    steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()
