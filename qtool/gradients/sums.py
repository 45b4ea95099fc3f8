"""Squares of what a matrix reads, and of the gradients by what it gives, summed over tokens."""

from dataclasses import dataclass
from typing import Any

import torch

from qtool.cuda.device import host
from qtool.gradients.sensitivity import Sensitivity
from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex


@dataclass
class Sums:
    """Of one matrix over some tokens."""

    rows: torch.Tensor | None = None  # [out], float64, of gradients
    columns: torch.Tensor | None = None  # [in], float64, of inputs
    count: int = 0  # tokens that it read

    def read(self, x: torch.Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1])
        self.columns = _added(self.columns, rows.square().sum(0, dtype=torch.float64))
        self.count += len(rows)

    def gave(self, gradient: torch.Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        self.rows = _added(self.rows, rows.square().sum(0, dtype=torch.float64))

    def take(self, other: "Sums") -> None:
        """Add those over other tokens."""
        self.count += other.count
        self.rows = _added(self.rows, other.rows)
        self.columns = _added(self.columns, other.columns)

    def sensitivity(self, tokens: int) -> Sensitivity | None:
        """tokens: of the whole text. None where no gradient came, or nothing was read."""
        if self.rows is None or self.columns is None:
            return None
        rows, columns = host(self.rows) / tokens, host(self.columns) / max(1, self.count)
        return Sensitivity(rows, columns, self.count)


Seen = dict[Matrix, Sums]


def observed(index: WeightIndex, seen: Seen) -> ObserveLinears:
    """Within, inputs of linear calls are summed, and later the gradients by their outputs."""

    def given(matrix: Matrix, x: torch.Tensor, _: torch.Tensor | None) -> None:
        seen.setdefault(matrix, Sums()).read(x)

    def made(matrix: Matrix, output: torch.Tensor, rows: Any) -> None:
        if output.requires_grad:
            sums = seen[matrix]
            hooked: Any = output  # the method has no types
            hooked.register_hook(lambda gradient: sums.gave(gradient[rows]))

    return ObserveLinears(index, given, made)


def add(sums: Seen, more: Seen) -> None:
    """Those over other tokens, which come in the order of the text."""
    for matrix, one in more.items():
        sums.setdefault(matrix, Sums()).take(one)


def _added(before: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if before is None or more is None:
        return more if before is None else before
    return before + more
