"""The rows of `qtool plan`'s table: tensors that differ only in their numbers share one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from qtool.gguf.planned import PlannedTensor
from qtool.messages.numbered import Parts, parts_of, ranges
from qtool.planned import Planned
from qtool.scheme import Dropped


@dataclass(frozen=True)
class Row:
    """One line: `count` tensors, `nbytes` written for all of them."""

    name: str
    shape: str
    stored: str
    count: int
    nbytes: int


class Listed(Protocol):
    """Of a planned tensor, what every row shows."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


AnyListed = TypeVar("AnyListed", bound=Listed)


def rows(
    tensors: Iterable[AnyListed], stored: Callable[[AnyListed], str], every: bool = False
) -> Iterator[Row]:
    """A row for each group of like tensors in order of first appearance, or for every tensor."""
    groups: dict[tuple[Parts, tuple[int, ...], str], list[AnyListed]] = {}
    for tensor in tensors:
        parts = (tensor.name,) if every else parts_of(tensor.name)
        groups.setdefault((parts, tensor.shape, stored(tensor)), []).append(tensor)
    for (parts, shape, said), members in groups.items():
        yield Row(
            ranges(parts, [tensor.name for tensor in members]),
            "x".join(map(str, shape)) or "1",
            said,
            len(members),
            sum(tensor.nbytes for tensor in members),
        )


def scheme_of(tensor: Planned) -> str:
    """How a safetensors artifact stores a tensor, or why it is not quantized."""
    if tensor.scheme is not None:
        return str(tensor.scheme)
    verb = "dropped" if isinstance(tensor.action, Dropped) else "dense"
    return f"{verb}: {tensor.reason}"


def type_of(tensor: PlannedTensor) -> str:
    """The type that a GGUF file stores a tensor in, and why where that is not plain."""
    reason = f": {tensor.why}" if tensor.why else ""
    return f"{tensor.type.name}{' kept' if not tensor.eligible else ''}{reason}"
