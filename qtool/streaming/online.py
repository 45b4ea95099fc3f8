"""Rotations that are computed while the model runs: of inputs of matrices, of queries and keys.

    R4    x -> x H before a matrix that holds W H:       (x H) (W H)' = x W'
    R3    q -> q H and k -> k H where attention is computed by one call, rotary embedding done:
          (q H) (k H)' = q k'

H is block-diagonal: S / sqrt(size), S = [[S, S], [S, -S]] of half the size (Sylvester), as often as
it fits. It is its own inverse and its own transpose. What is computed is in online_rotation.py,
which brings torch along; that something is to be, a file tells without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Online:
    """Sizes of H: by the checkpoint name of a matrix, and of a block's heads by its number."""

    inputs: dict[str, int] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.inputs) or bool(self.heads)

    def become(self, other: Online) -> None:
        """Hold what another holds; whoever shares this one sees it."""
        for mine, its in ((self.inputs, other.inputs), (self.heads, other.heads)):
            new: dict[Any, int] = dict(its)
            mine.clear()
            mine.update(new)

    def without_heads(self) -> Online:
        """R4 alone."""
        return Online(dict(self.inputs))

    def inside(
        self, index: int, weights: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Within, calls of block `index` get rotated inputs; in the thread that enters it.

        weights: the block's, by checkpoint name.
        """
        from qtool.streaming.online_rotation import rotated_inside

        sizes = [(view, self.inputs[name]) for name, view in weights.items() if name in self.inputs]
        return rotated_inside(sizes, self.heads.get(index))


def block_size(width: int) -> int:
    """The largest power of two that divides a width: of such sizes alone engines know H."""
    return width & -width
