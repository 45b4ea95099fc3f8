"""What a forward pass of a block on a small input shows: its linear calls and what its norms make.

Inputs and outputs are known by the bytes of their rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from qtool.streaming.linears import Matrix, ObserveLinears, WeightIndex
from qtool.streaming.stream import Call, LoadedBlock


@dataclass(frozen=True)
class TracedCall:
    """A matrix, and the input that it was called on."""

    matrix: Matrix
    bias: str | None  # parameter name within the block
    rows: tuple[int, ...]  # hashes
    calls: int  # with the same rows, or one for each chunk of the rows
    seen: int  # rows in all calls
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Trace:
    """What a forward pass showed, in the block's own names."""

    tokens: int
    calls: tuple[TracedCall, ...]  # one a matrix
    norms: tuple[tuple[str, str | None, frozenset[int]], ...]  # weight, bias, output rows


def watch(block: LoadedBlock, hidden: torch.Tensor, call: Call) -> Trace:
    """Run the block and take down what it calls."""
    index = WeightIndex(block.module)
    calls: dict[tuple[Matrix, str | None], TracedCall] = {}
    norms: list[tuple[str, str | None, frozenset[int]]] = []

    def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        key = matrix, index.bias(bias)
        rows = _row_hashes(x)
        if not rows:  # an expert that the probe does not reach, in a product of all
            return
        before = calls.get(key)
        if before is None:
            parameter = block.module.get_parameter(matrix.parameter)
            out_features, in_features = matrix.of(parameter).shape
            calls[key] = TracedCall(*key, rows, 1, len(rows), in_features, out_features)
        else:
            # Called again on the same input, or on the next chunk of it.
            whole = before.rows if rows == before.rows else before.rows + rows
            calls[key] = replace(
                before, rows=whole, calls=before.calls + 1, seen=before.seen + len(rows)
            )

    def hook(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def remember(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.ndim > 0:
                has_bias = isinstance(getattr(module, "bias", None), nn.Parameter)
                bias = f"{path}.bias" if has_bias else None
                norms.append((f"{path}.weight", bias, frozenset(_row_hashes(output))))

        return remember

    hooks = []
    for path, module in block.module.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 1:
            hooks.append(module.register_forward_hook(hook(path)))
    try:
        with ObserveLinears(index, observe):
            block.try_out(hidden, call)
    finally:
        for handle in hooks:
            handle.remove()
    tokens = hidden.shape[0] * hidden.shape[1]
    return Trace(tokens, tuple(calls.values()), tuple(norms))


def _row_hashes(x: torch.Tensor) -> tuple[int, ...]:
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()
    return tuple(hash(row.tobytes()) for row in rows)
