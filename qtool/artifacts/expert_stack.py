"""Experts that lie in one tensor in MXFP4, read as rows of numbers: some at a time, as a tensor of
all of them in float32 is eight times as large."""

from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact


@dataclass(frozen=True)
class ExpertStack:
    """The numbers of a tensor [experts, in, out], as a matrix [experts * in, out]; of biases
    [experts, out], as they are."""

    artifact: Artifact
    name: str
    # The expert whose rows are being read, so that it is dequantized once.
    _opened: dict[int, NDArray[np.float32]] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all experts, and columns."""
        *rows, columns = self.artifact.entry(self.name).shape
        return prod(rows), columns

    def dequantize(self) -> NDArray[np.float32]:
        """All of it."""
        return self.rows(0, self.shape[0])

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        """float32 [last - first, columns]"""
        each = self.shape[0] // self.artifact.entry(self.name).shape[0]
        found = []
        while first < last:
            expert, start = divmod(first, each)
            stop = min(each, start + last - first)
            found.append(self._expert(expert)[start:stop])
            first += stop - start
        return np.concatenate(found) if found else np.empty((0, self.shape[1]), np.float32)

    def _expert(self, number: int) -> NDArray[np.float32]:
        if number not in self._opened:
            self._opened.clear()
            found = self.artifact.experts(self.name, number, number + 1)
            self._opened[number] = found.reshape(-1, self.shape[1])
        return self._opened[number]
