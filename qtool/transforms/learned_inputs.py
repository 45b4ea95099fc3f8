"""What learned rotations know of inputs that are rounded to integers.

    u / |W X|^2 * |W|^2 * mean over tokens of t^2 / 12,    t = max |x R| / (2^(bits - 1) - 1)

the noise of a step t that a token's largest number asks for, which a matrix hands on from all
channels alike: to its output as much as the noise of its weights is counted in. x is what a norm
makes without its gain, where R is R1, and what the reader of values reads, where it is R2. Scales
of groups, and one for all tokens, take the largest of those. A few tokens of each input are kept.
"""

from dataclasses import dataclass

import torch

from qtool.recipe.weights import Activations

TOKENS = 128  # of each input


@dataclass(frozen=True)
class Inputs:
    """Vectors that a rotation changes before they are rounded, and how much their noise counts."""

    vectors: torch.Tensor  # [tokens, n], float16
    weight: float
    rounded: Activations

    def cost(self, matrix: torch.Tensor) -> torch.Tensor:
        """With R, [n, n], or with R2, [size, size], of each head."""
        vectors = self.vectors.float()
        rotated = (vectors.reshape(-1, len(matrix)) @ matrix).reshape(vectors.shape)
        return self.weight * noise(rotated, self.rounded)


def noise(rotated: torch.Tensor, rounded: Activations) -> torch.Tensor:
    """The mean square that rounding adds to each number of [tokens, n]."""
    size = rounded.group_size if rounded.group_size > 0 else rotated.shape[1]
    if not rounded.dynamic or rounded.scale == "tensor":
        size = rotated.numel()
    most = 2 ** (rounded.bits - 1) - 1
    step: torch.Tensor = rotated.reshape(-1, size).abs().amax(dim=-1) / most
    return step.square().mean() / 12


def spaced(rows: torch.Tensor) -> torch.Tensor:
    """A few rows of [tokens, n], evenly spaced, in 16 bits."""
    chosen = torch.linspace(0, len(rows) - 1, min(len(rows), TOKENS)).long()
    kept = rows[chosen].float()
    return kept.half() if float(kept.abs().max()) < 6e4 else kept
