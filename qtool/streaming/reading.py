"""Checkpoint tensors into torch tensors, in float32, a limited number of bytes at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from qtool.errors import SourceError, UnsupportedError
from qtool.streaming.finite import not_finite
from qtool.streaming.torch_calls import TorchCalls
from qtool.streaming.weights import Weights

STORED = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
}  # fmt: skip
_PART_BYTES = 1 << 22
Table = tuple[str, ...]  # the checkpoint tensors that an embedding is made of, one above the other


class Reading(Protocol):
    """How a model's parameters come to be where it runs."""

    @property
    def place(self) -> torch.device:
        """Where that is."""

    def copy(self, name: str, target: torch.Tensor) -> None:
        """Write a checkpoint tensor into `target` [same shape], which is there."""


@dataclass(frozen=True)
class OnHost:
    """On the CPU."""

    weights: Weights

    @property
    def place(self) -> torch.device:
        """Where parameters are."""
        return torch.device("cpu")

    def copy(self, name: str, target: torch.Tensor) -> None:
        """See copy_tensor."""
        copy_tensor(self.weights, name, target)


def copy_tensor(
    checkpoint: Weights,
    name: str,
    target: torch.Tensor,
    put: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Read a tensor into `target` [same shape]; NaN and infinity are refused.

    put: brings a part, as it is stored, to where the target is.
    """
    for start, part in parts(checkpoint, name, target.dtype):
        there = part if put is None else put(part)
        if target.ndim == 0:
            target.copy_(there.reshape(()))
        else:
            target[start : start + len(part)].copy_(there)
    if target.is_floating_point():
        require_finite(checkpoint, name, target)


def parts(checkpoint: Weights, name: str, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor in its stored dtype, some rows at a time, each with the number of its first row.

    `dtype`: what it is to become; a float needs a float, so that nothing packed is taken for one.
    """
    info = checkpoint.tensors[name]
    if dtype.is_floating_point and info.dtype not in STORED:
        raise UnsupportedError(
            f"{name}: stored as {info.dtype}; this version calibrates models stored in "
            f"{', '.join(STORED)}"
        )
    if not dtype.is_floating_point or not info.shape or info.nbytes == 0:
        raw = checkpoint.array(name) if info.dtype not in STORED else checkpoint.float32(name)
        yield 0, torch.from_numpy(raw)
        return
    row = info.nbytes // info.shape[0]
    step = max(1, _PART_BYTES // row)
    for start in range(0, info.shape[0], step):
        stop = min(start + step, info.shape[0])
        raw = checkpoint.part(name, start, stop)
        shape = (stop - start, *info.shape[1:])
        yield start, torch.from_numpy(raw).view(STORED[info.dtype]).view(shape)


def require_finite(checkpoint: Weights, name: str, values: torch.Tensor) -> None:
    """SourceError that names the first NaN or infinity."""
    if values.numel() == 0:
        return
    low, high = torch.aminmax(values)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        bad = (~torch.isfinite(values)).nonzero()[0].tolist()
        raise not_finite(checkpoint, name, bad, float(values[tuple(bad)]))


class EmbeddingRows(TorchCalls):
    """Within, looking up a table that lies on the meta device reads the rows that are looked up.

    A vocabulary of 262,144 words 5376 wide is 5.6 GB in float32; calibration text uses few words.
    """

    def __init__(
        self, checkpoint: Weights, tables: Mapping[int, Table], announced: NDArray[np.int64]
    ) -> None:
        """tables: by the id of the parameter. announced: ids that will come."""
        super().__init__()
        self._checkpoint = checkpoint
        self._tables = tables
        self._announced = torch.from_numpy(np.unique(announced))
        self._read: dict[Table, tuple[torch.Tensor, torch.Tensor]] = {}  # sorted ids, rows
        # By table, [...] and [..., width], where torch is to go back to them: to be set by who
        # wants it.
        self.looked_up: list[tuple[str, torch.Tensor, torch.Tensor]] | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.Tensor.to and _names_meta((*args[1:], *kwargs.values())):
            return args[0]  # a model that moves the ids to where its table is
        if func is torch.Tensor.__getitem__ and id(args[0]) in self._tables:
            return self._item(args[0], args[1])
        if func is not F.embedding:
            return func(*args, **kwargs)
        ids, weight = _embedding_arguments(*args, **kwargs)
        if weight.device.type != "meta":
            return func(*args, **kwargs)
        table = self._tables.get(id(weight))
        if table is None:
            raise SourceError(
                f"{self._checkpoint.path}: no tensor for an embedding of shape "
                f"{list(weight.shape)}, which the model needs; the checkpoint is incomplete"
            )
        here = ids.cpu().contiguous()  # a part of a table of positions is not; torch warns of it
        with torch.device("cpu"):  # whatever makes tensors elsewhere by default around the model
            known, rows = self._rows(table, here)
        found = rows[torch.searchsorted(known, here)].to(ids.device)
        return found if self.looked_up is None else self._noted(table, here, found)

    def _noted(self, table: Table, ids: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """The same rows, to which torch can go back tensor by tensor, and a model may write."""
        assert self.looked_up is not None
        whole, begin = torch.empty_like(found), 0
        for name in table:
            size = self._checkpoint.tensors[name].shape[0]
            own = (begin <= ids) & (ids < begin + size)
            part = found[own].requires_grad_()
            self.looked_up.append((name, ids[own] - begin, part))
            whole = whole.index_put((own,), part)
            begin += size
        return whole

    def _item(self, table: torch.Tensor, index: Any) -> torch.Tensor:
        """table[index], of which the first number says a row."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        if table.device.type != "meta" or type(first) is not int:
            return table[index]
        with torch.device("cpu"):
            ids = torch.tensor([first % len(table)])
            known, rows = self._rows(self._tables[id(table)], ids)
        return rows[torch.searchsorted(known, ids)][(0, *rest)]

    def _rows(self, table: Table, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = [self._checkpoint.tensors[name].shape for name in table]
        size, width = sum(shape[0] for shape in shapes), shapes[0][1]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise SourceError(
                f"{table[0]}: the model looks up row {int(ids.max())} of {size}; the text is "
                "longer than the model's positions, or its tokenizer is not the model's"
            )
        known, rows = self._read.get(table, (torch.empty(0, dtype=torch.int64), torch.empty(0, 0)))
        if bool(torch.isin(ids, known).all()):
            return known, rows
        announced = self._announced[self._announced < size]
        wanted = torch.unique(torch.cat([known, announced, ids.reshape(-1)]))
        rows = torch.empty(len(wanted), width)
        begin = 0
        for name, shape in zip(table, shapes, strict=True):
            first, end = torch.searchsorted(wanted, torch.tensor([begin, begin + shape[0]]))
            own = wanted[first:end] - begin
            self._copy_rows(name, own, rows[first:end])
            begin += shape[0]
        self._read[table] = wanted, rows
        return wanted, rows

    def _copy_rows(self, name: str, wanted: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows of one tensor, by their sorted numbers in it."""
        for start, part in parts(self._checkpoint, name, torch.float32):
            first, last = torch.searchsorted(wanted, torch.tensor([start, start + len(part)]))
            rows[first:last] = part[wanted[first:last] - start].to(torch.float32)
        require_finite(self._checkpoint, name, rows)


def _names_meta(arguments: Sequence[Any]) -> bool:
    return any(isinstance(a, torch.device) and a.type == "meta" for a in arguments)


def _embedding_arguments(
    input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two arguments of F.embedding that matter; the others only steer gradients."""
    return input, weight
