"""The rotations of online.py, computed. What observes or rounds inputs around the forward pass
meets the rotated ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from qtool.streaming.by_address import ByAddress
from qtool.streaming.torch_calls import TorchCalls


def rotated_inside(
    weights: Sequence[tuple[torch.Tensor, int]], heads: int | None
) -> AbstractContextManager[Any]:
    """Within, calls get rotated inputs; in the thread that enters it.

    weights: matrices, each with the size of H that rotates its inputs. heads: of queries and keys.
    """
    if not weights and heads is None:
        return nullcontext()
    return _Rotated(ByAddress.of(weights), heads)


def rotated(x: torch.Tensor, size: int) -> torch.Tensor:
    """x H along the last axis, number by number in a fixed order."""
    rows = x.reshape(-1, size).clone()
    half = 1
    while half < size:
        pairs = rows.view(-1, size // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        less = first - second
        first += second
        second.copy_(less)
        half *= 2
    # A number of the host's a GPU would not divide by, but multiply with its rounded reciprocal.
    root = torch.full((), math.sqrt(size), dtype=torch.float64, device=rows.device)
    return rows.div_(root).reshape(x.shape)


class _Rotated(TorchCalls):
    def __init__(self, sizes: ByAddress[int], heads: int | None) -> None:
        super().__init__()
        self._sizes = sizes
        self._heads = heads

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.linear and self._sizes:
            args, kwargs = self._linear(*args, **kwargs), {}
        elif func is F.scaled_dot_product_attention and self._heads is not None:
            args, kwargs = _attention(self._heads, *args, **kwargs)
        return func(*args, **kwargs)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        size = self._sizes.find(weight)
        return (input if size is None else rotated(input, size)), weight, bias


def _attention(
    size: int, query: torch.Tensor, key: torch.Tensor, *more: Any, **options: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (rotated(query, size), rotated(key, size), *more), options
