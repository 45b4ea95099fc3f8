"""A forward pass in which inputs of matrices are rounded, as an engine rounds them.

A matrix is known at the call itself, by the address of its weights, as in
qtool/streaming/linears.py: models call F.linear on slices of 3-D parameters, which have no
module. Keys and values are rounded where attention is computed by one call.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qtool.methods.activations import Rounding
from qtool.streaming.by_address import ByAddress
from qtool.streaming.linears import ADDMMS, MATMULS
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock
from qtool.streaming.torch_calls import TorchCalls


@dataclass(frozen=True)
class Kept:
    """What attention keeps: of each block, by its number, the roundings of keys and values."""

    name: str
    of_block: Callable[[int], tuple[Rounding, Rounding]]


@dataclass(frozen=True)
class Activations:
    """Roundings of inputs by the name of the matrix, and of what attention keeps."""

    of_matrix: Mapping[str, Rounding] = field(default_factory=dict)
    kept: Kept | None = None
    not_simulated: tuple[str, ...] = ()  # what an engine rounds, and is not rounded here

    def fitting(self, skeleton: Skeleton) -> "Activations":
        """Less what cannot be done with this model."""
        if self.kept is None or skeleton.one_call:
            return self
        said = f"the KV cache in {self.kept.name}: attention of this model is not one call"
        return replace(self, kept=None, not_simulated=(*self.not_simulated, said))

    def inside(self, block: LoadedBlock) -> AbstractContextManager[Any]:
        """Within, the block's linears read rounded inputs; in the thread that enters it."""
        if not self:
            return nullcontext()
        by_address = ByAddress.of(
            (matrix, self.of_matrix[name])
            for name, view in block.weights.items()
            if name in self.of_matrix
            for matrix in (view if view.ndim == 3 else (view,))
        )
        kept = self.kept.of_block(block.index) if self.kept is not None else None
        return RoundedInputs(by_address.find, kept)

    def outside(self, skeleton: Skeleton) -> AbstractContextManager[Any]:
        """Within, the linears before and after the blocks do, the head above all."""
        if not self:
            return nullcontext()
        found: list[tuple[nn.Module, Rounding]] = []
        tied = getattr(skeleton.model, "all_tied_weights_keys", None) or {}
        for path, module in skeleton.model.named_modules():
            if f"{path}.".startswith(skeleton.prefix) or "weight" not in module._parameters:
                continue
            name = f"{path}.weight"
            of_parameter = skeleton.names.of_parameter
            for piece in of_parameter.get(name) or of_parameter.get(tied.get(name, ""), ()):
                if piece.checkpoint_name in self.of_matrix:
                    found.append((module, self.of_matrix[piece.checkpoint_name]))

        def find(weight: torch.Tensor) -> Rounding | None:
            # Their weights are read when they are first called.
            return next((r for module, r in found if module._parameters["weight"] is weight), None)

        return RoundedInputs(find, None)

    def __bool__(self) -> bool:
        return bool(self.of_matrix) or self.kept is not None

    def json(self) -> dict[str, Any]:
        """For the protocol of an evaluation."""
        names = sorted({rounding.name for rounding in self.of_matrix.values()})
        return {
            "activations": "+".join(names) or "float32",
            "kv_cache": self.kept.name if self.kept is not None else "float32",
            "not_simulated": list(self.not_simulated),
        }


class RoundedInputs(TorchCalls):
    """Within, what is multiplied with a known matrix is rounded first."""

    def __init__(
        self,
        find: Callable[[torch.Tensor], Rounding | None],
        kept: tuple[Rounding, Rounding] | None,
    ) -> None:
        """find: the rounding of the input of a matrix. kept: of keys and values."""
        super().__init__()
        self._find = find
        self._kept = kept
        self._last: tuple[torch.Tensor, int, Rounding, torch.Tensor] | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.linear:
            args, kwargs = self._linear(*args, **kwargs), {}
        elif func in MATMULS and len(args) == 2:
            args = self._rounded(args[0], args[1]), args[1]
        elif func in ADDMMS and len(args) == 3:
            args = args[0], self._rounded(args[1], args[2]), args[2]
        elif func is F.scaled_dot_product_attention and self._kept is not None:
            args, kwargs = self._attention(self._kept, *args, **kwargs)
        return func(*args, **kwargs)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self._rounded(input, weight), weight, bias

    def _attention(
        self,
        kept: tuple[Rounding, Rounding],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (query, kept[0].apply(key), kept[1].apply(value), *more), options

    def _rounded(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rounding = self._find(weight)
        if rounding is None:
            return x
        last = self._last
        # q, k and v read one tensor.
        if last is not None and last[0] is x and last[1] == x._version and last[2] is rounding:
            return last[3]
        rounded = rounding.apply(x)
        self._last = x, x._version, rounding, rounded
        return rounded
