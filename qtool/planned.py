"""One source tensor of a plan: what becomes of it, and what is written for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from qtool.formats.safetensors_file import TensorSpec
from qtool.scheme import Action, Scheme


@dataclass(frozen=True)
class Planned:
    """One source tensor, what becomes of it, and the tensors that are written for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    action: Action
    outputs: tuple[TensorSpec, ...]
    block: int | None  # the decoder block it belongs to; None outside, and beyond the last one run
    fused: bool = False  # whether it holds experts fused in one tensor, for whatever reason

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of a quantized tensor."""
        return self.action if isinstance(self.action, Scheme) else None

    @property
    def reason(self) -> str | None:
        """Why it is dense or dropped."""
        return None if isinstance(self.action, Scheme) else self.action.reason

    @property
    def nbytes(self) -> int:
        """Bytes written for it."""
        return sum(spec.nbytes for spec in self.outputs)

    @property
    def parameters(self) -> int:
        """Numbers in the source tensor."""
        return prod(self.shape)


class PlannedAll(Protocol):
    """What those who work on tensors ask a whole plan (qtool.planning.plan.Plan)."""

    @property
    def by_name(self) -> Mapping[str, Planned]: ...  # of source tensors
    def target(self, name: str) -> Scheme | None: ...  # what transforms make a tensor ready for
