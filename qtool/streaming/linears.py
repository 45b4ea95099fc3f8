"""Linear calls on a block's parameters, seen as they are made.

No module is asked for its kind. A torch function mode sees every F.linear (and matmul, mm, addmm)
whose weight is part of a parameter, known by storage and offset: transformers 5 calls F.linear on
slices of 3-D parameters, which have no module to hook. Some keep their experts as [in, out]
(gpt-oss), and some multiply by all of them in one product (Llama 4): there an expert reads the rows
that the router has not made zero.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qtool.streaming.joined_rows import Joined
from qtool.streaming.torch_calls import TorchCalls


@dataclass(frozen=True)
class Matrix:
    """The matrix of one linear call: a 2-D parameter, one slice of a 3-D one, or rows of a joined
    one."""

    parameter: str  # name within the block, "self_attn.q_proj.weight"
    expert: int | None  # which slice of a 3-D parameter
    transposed: bool = False  # the slice is [in, out]
    rows: tuple[int, int] | None = None  # of a 2-D parameter, from the first to behind the last

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The matrix [out, in], a view."""
        part = parameter if self.expert is None else parameter[self.expert]
        part = part if self.rows is None else part[slice(*self.rows)]
        return part.mT if self.transposed else part


class WeightIndex:
    """From a tensor handed to a linear call back to the block's parameter it is part of."""

    def __init__(self, module: nn.Module) -> None:
        self._owner: dict[int, tuple[str, torch.Tensor]] = {}
        self._joined = {id(one) for part in module.modules() if isinstance(part, Joined)
                        for one in part.parameters()}  # fmt: skip
        for name, parameter in module.named_parameters():
            self._owner.setdefault(parameter.untyped_storage().data_ptr(), (name, parameter))

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """The matrix that `weight` [out, in] is, or None."""
        owner = self._owner.get(weight.untyped_storage().data_ptr())
        if owner is None or weight.ndim != 2:
            return None
        name, parameter = owner
        offset = int(weight.storage_offset() - parameter.storage_offset())
        if id(parameter) in self._joined:
            first, inside = divmod(offset, parameter.stride(0))
            alike = weight.shape[1] == parameter.shape[1] and weight.stride() == parameter.stride()
            rows = (first, first + len(weight))
            return Matrix(name, None, rows=rows) if alike and not inside else None
        transposed = parameter.ndim == 3 and _same(weight.t(), parameter)
        if not transposed and not _same(weight, parameter):
            return None
        if parameter.ndim == 2:
            return Matrix(name, None) if offset == 0 else None
        if parameter.ndim == 3 and offset % parameter.stride(0) == 0:
            return Matrix(name, offset // parameter.stride(0), transposed)
        return None

    def matrices(self, weights: torch.Tensor) -> list[Matrix]:
        """Those that `weights` [experts, out, in] are, all of a 3-D parameter, or none."""
        first = self.matrix(weights[0]) if weights.ndim == 3 and len(weights) else None
        if first is None or first.expert != 0:
            return []
        parameter = self._owner[weights.untyped_storage().data_ptr()][1]
        if len(weights) != len(parameter) or weights.stride(0) != parameter.stride(0):
            return []
        return [replace(first, expert=expert) for expert in range(len(weights))]

    def bias(self, bias: torch.Tensor | None) -> str | None:
        """The name of the 1-D parameter that `bias` is, or a part of a joined one; or None."""
        if bias is None:
            return None
        name, parameter = self._owner.get(bias.untyped_storage().data_ptr(), (None, bias))
        whole = parameter.shape == bias.shape or id(parameter) in self._joined
        return name if whole else None


def _same(weight: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether one lies in memory as the last two dimensions of the other do."""
    return weight.shape == parameter.shape[-2:] and weight.stride() == parameter.stride()[-2:]


MATMULS = {
    torch.matmul,
    torch.mm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.__matmul__,
}
BMMS = {torch.bmm, torch.Tensor.bmm, *MATMULS}
ADDMMS = {torch.addmm, torch.Tensor.addmm}

# What an observer is told of each call: matrix, input [..., in], bias.
Observer = Callable[[Matrix, torch.Tensor, torch.Tensor | None], None]
# Of each result: matrix, output, and which of its rows [..., out] the matrix made.
Made = Callable[[Matrix, torch.Tensor, Any], None]


class ObserveLinears(TorchCalls):
    """Within, `observer` hears of linear calls on the block's parameters, before they are made, and
    `made` of what they gave."""

    def __init__(self, index: WeightIndex, observer: Observer, made: Made | None = None) -> None:
        super().__init__()
        self._index = index
        self._observer = observer
        self._made = made

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in BMMS and len(args) == 2 and not kwargs and _stacks(*args):
            return self._experts(func, *args)
        seen: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        if func is F.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            seen = x, weight, bias
        elif func in MATMULS and len(args) == 2 and args[1].ndim == 2:
            seen = args[0], args[1].t(), None
        elif func in ADDMMS and len(args) == 3 and args[2].ndim == 2:
            seen = args[1], args[2].t(), args[0]
        matrix = None
        if seen is not None:
            x, weight, bias = seen
            matrix = self._index.matrix(weight)
            if matrix is not None:
                self._observer(matrix, x, bias)
        found = func(*args, **kwargs)
        if matrix is not None and self._made is not None:
            self._made(matrix, found, ...)
        return found

    def _experts(
        self, func: Callable[..., Any], x: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """A product [experts, rows, in] x [experts, in, out] of all experts at once."""
        matrices = self._index.matrices(weights.mT)
        routed = [rows.detach().any(-1) for rows in x] if matrices else []
        parts = [*enumerate(zip(matrices, routed, strict=True))]
        for expert, (matrix, own) in parts:
            self._observer(matrix, x[expert, own], None)
        found: torch.Tensor = func(x, weights)
        made = self._made
        if made is not None:
            for expert, (matrix, own) in parts:
                made(matrix, found, (expert, own))
        return found


def _stacks(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether each of several matrices has rows of its own."""
    return x.ndim == weights.ndim == 3 and len(x) == len(weights)


def _linear_arguments(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """F.linear's own signature, so that keywords are told apart as it does."""
    return input, weight, bias
