"""What is known of matrices, found again at the calls that multiply by them."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

import torch

Known = TypeVar("Known")


@dataclass(frozen=True)
class _Place(Generic[Known]):
    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    itemsize: int
    known: Known

    def has(self, weight: torch.Tensor) -> bool:
        """Whether it begins here, or is some of the rows."""
        offset, rest = divmod(weight.data_ptr() - self.start, self.itemsize)
        if not offset:
            return True
        alike = weight.ndim == 2 and weight.stride() == self.stride
        if not alike or weight.shape[1] != self.shape[1] or rest:
            return False
        first, inside = divmod(offset, self.stride[0])
        return not inside and first + len(weight) <= self.shape[0]


@dataclass(frozen=True)
class ByAddress(Generic[Known]):
    """Of matrices in memory: rows of one are known as the whole is."""

    _places: tuple[_Place[Known], ...]  # in the order of their starts

    @classmethod
    def of(cls, tensors: Iterable[tuple[torch.Tensor, Known]]) -> "ByAddress[Known]":
        """Of tensors that stay where they are."""
        every = (
            _Place(one.data_ptr(), one.shape, one.stride(), one.itemsize, known)
            for one, known in tensors
        )
        return cls(tuple(sorted(every, key=attrgetter("start"))))

    def __bool__(self) -> bool:
        return bool(self._places)

    def find(self, weight: torch.Tensor) -> Known | None:
        """Of what begins where one of them does, or is rows of one."""
        at = bisect_right(self._places, weight.data_ptr(), key=attrgetter("start")) - 1
        place = self._places[at] if at >= 0 else None
        return place.known if place is not None and place.has(weight) else None
