"""Matrix products with matrices that stay as they are stored.

    on a device    up to 8 vectors: the kernel that multiplies packed words, where a format has one;
                   more: the matrix dequantized to float16 for this matmul
    on the CPU     the matrix in float32: dequantized once and kept where there is room in memory,
                   else for this matmul

A matrix is known by where it lies in its parameter, which stays on torch's meta device: whole, or
the slice of one expert, which may be made of two matrices of the checkpoint (gate and up). Of one
that several modules have rows of, all are computed, once for an input that they share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from qtool.cuda.device import Device
from qtool.cuda.pack_gemv_tasks import MOST
from qtool.quality.packed import Packed
from qtool.quality.reading import OnDevice
from qtool.quality.rounded_inputs import Activations
from qtool.streaming.online import Online
from qtool.streaming.online_rotation import rotated
from qtool.streaming.reading import STORED, parts
from qtool.streaming.torch_calls import TorchCalls
from qtool.streaming.weights import Weights

_HALF = ("F16", "BF16")
Matmul = Callable[[torch.Tensor], torch.Tensor]  # float32 [..., in] -> [..., out]
# What asks a tensor for something else than its numbers.
_LOOKS = {"size", "dim", "stride", "numel", "is_floating_point", "element_size", "is_contiguous"}
# Of a matmul with what is not there torch makes whatever lies in memory.
_MEANINGLESS = "{} is given a weight otherwise than as a matrix"
_VIEWS = {"T", "mT", "H", "mH", "data", "real"}  # properties that are of a tensor's numbers
Key = tuple[int, int]  # the storage of a parameter, and where in it a matrix begins


def key(weight: torch.Tensor) -> Key:
    """Of a parameter, or of an expert's slice of one."""
    return int(weight.untyped_storage()._cdata), int(weight.storage_offset())


def _absent(value: object) -> bool:
    """Whether it is a tensor that has no numbers, or several of which one has none."""
    if isinstance(value, torch.Tensor):
        return value.is_meta
    return isinstance(value, list | tuple) and any(map(_absent, value))


@dataclass
class InFloat32:
    """Matrices on the CPU, of which the first that are multiplied are kept, while there is room."""

    weights: Weights
    room: int  # bytes that are left
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)  # those that there was no room for

    def matrix(self, name: str) -> torch.Tensor:
        """[out, in], the numbers that `weights` has."""
        found = self.kept.get(name)
        if found is None:
            found = self._read(name)
            if found.nbytes <= self.room:
                self.room -= found.nbytes
                self.kept[name] = found
            else:
                self.left_out.add(name)
        return found

    def _read(self, name: str) -> torch.Tensor:
        info = self.weights.tensors[name]
        if info.dtype not in _HALF:
            return torch.from_numpy(self.weights.float32(name))
        whole = torch.empty(info.shape)  # several times as fast as numpy makes float32 of them
        for start, part in parts(self.weights, name, torch.float32):
            whole[start : start + len(part)].copy_(part)
        return whole


@dataclass(frozen=True)
class Matrix:
    """One of them, by its checkpoint name."""

    name: str
    shape: tuple[int, ...]  # [out, in]
    times: Matmul
    numbers: Callable[[], torch.Tensor]  # float32, of all of it
    fused: bool  # whether vectors are multiplied by packed words
    rows: slice | None = None  # those of its outputs that are wanted, where it is not all


def matrix(reading: InFloat32 | OnDevice, name: str) -> Matrix:
    """A matrix [out, in] of the model, ready to multiply."""
    shape = tuple(reading.weights.tensors[name].shape)
    if isinstance(reading, InFloat32):
        there = partial(reading.matrix, name)
        return Matrix(name, shape, lambda x: F.linear(x, there()), there, False)
    found = reading.packed(name)
    if found is None:
        kept = _dense(reading.weights, name, reading.device)
        return Matrix(
            name, shape, lambda x: F.linear(x.to(kept.dtype), kept).float(), kept.float, False
        )
    return Matrix(
        name,
        shape,
        _packed(found, reading.device),
        partial(_unpacked, found, reading.device),
        found.times is not None,
    )


def _dense(weights: Weights, name: str, device: Device) -> torch.Tensor:
    """Kept as it is stored, float32 where that is nothing that torch multiplies."""
    info = weights.tensors[name]
    there = torch.empty(info.shape, dtype=STORED[info.dtype], device=device.place)
    for start, part in parts(weights, name, torch.float32):
        there[start : start + len(part)].copy_(part)
    return there


def _unpacked(found: Packed, device: Device) -> torch.Tensor:
    weight = torch.empty(found.shape, dtype=torch.float16, device=device.place)
    device.launch(found.dense(weight))
    return weight.float()


def _packed(found: Packed, device: Device) -> Matmul:
    def matmul(x: torch.Tensor) -> torch.Tensor:
        vectors = x.reshape(-1, found.shape[1]).to(torch.float16).contiguous()
        if found.times is not None and len(vectors) <= MOST:
            kept: list[torch.Tensor] = []  # until the tasks are under way

            def room(numbers: int) -> torch.Tensor:
                kept.append(torch.empty(numbers, device=device.place))
                return kept[-1]

            out = vectors.new_empty(len(vectors), found.shape[0])
            # All matrices are there before the first token is, which is copied: whatever a matmul
            # reads early is older.
            device.launch(*found.times(vectors, out, room), programmatic=True)
        else:
            weight = vectors.new_empty(found.shape)
            device.launch(found.dense(weight))
            out = vectors @ weight.T
        return out.float().reshape(*x.shape[:-1], found.shape[0])

    return matmul


class Matmuls(TorchCalls):
    """Within, matmuls with known matrices are computed as above, and inputs, keys and values are
    rotated and rounded as an engine would. `block`: the number of the one that runs."""

    def __init__(
        self, matrices: Mapping[Key, Sequence[Matrix]], online: Online, rounded: Activations
    ) -> None:
        """matrices: by their places, those whose outputs lie one after the other."""
        super().__init__()
        self._matrices = matrices
        self._online = online
        self._rounded = rounded
        self.block = 0
        self.failed = False  # a matmul, not the model's own code
        # Of which all outputs were computed last: its name, the input as it was, and they.
        self._last: tuple[str, torch.Tensor, int, torch.Tensor] | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return func(*self._attention(*args), **kwargs)
        if not any(map(_absent, args)) and not any(map(_absent, kwargs.values())):
            return func(*args, **kwargs)
        what = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__  # type: ignore[attr-defined]
        if what in _LOOKS or (func.__name__ == "__get__" and what not in _VIEWS):
            return func(*args, **kwargs)
        args = tuple(map(self._there, args))
        kwargs = {name: self._there(value) for name, value in kwargs.items()}
        found = func(*args, **kwargs)
        if any(map(_absent, args)) or any(map(_absent, kwargs.values())):
            parts = found if isinstance(found, tuple) else (found,)
            if any(isinstance(one, torch.Tensor) and not one.is_meta for one in parts):
                raise RuntimeError(_MEANINGLESS.format(what))
        return found

    def _there(self, value: Any) -> Any:
        """A matrix that a model multiplies by in a way of its own, with its numbers."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._there, value))
        known = self._known(value) if _absent(value) else None
        if known is None:
            return value
        try:
            every = [one.numbers() for one in known]
        except BaseException:
            self.failed = True
            raise
        if len(known) == 1 and known[0].rows is None:
            return every[0]
        rows = [one.rows or slice(None) for one in known]
        return torch.cat([part[own] for part, own in zip(every, rows, strict=True)])

    def _known(self, weight: torch.Tensor) -> Sequence[Matrix] | None:
        """The matrices that it is, one above the other."""
        known = self._matrices.get(key(weight))
        if known is None:
            return None
        rows = [one.rows or slice(0, one.shape[0]) for one in known]
        out = sum(own.stop - own.start for own in rows)
        return known if tuple(weight.shape) == (out, known[0].shape[1]) else None

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        known = self._known(weight)
        if known is None:
            if weight.is_meta:
                raise RuntimeError(_MEANINGLESS.format("linear"))
            return F.linear(input, weight, bias)
        try:
            parts = [self._times(one, input) for one in known]
        except BaseException:
            self.failed = True
            raise
        matmul = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return matmul if bias is None else matmul + bias

    def _times(self, one: Matrix, x: torch.Tensor) -> torch.Tensor:
        if one.rows is None:
            return self._all_rows(one, x)
        last = self._last
        if last is None or last[0] != one.name or last[1] is not x or last[2] != x._version:
            last = self._last = (one.name, x, x._version, self._all_rows(one, x))
        return last[3][..., one.rows]

    def _all_rows(self, one: Matrix, x: torch.Tensor) -> torch.Tensor:
        size = self._online.inputs.get(one.name)
        x = x if size is None else rotated(x, size)
        rounding = self._rounded.of_matrix.get(one.name)
        return one.times(x if rounding is None else rounding.apply(x))

    def _attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any
    ) -> tuple[Any, ...]:
        size = self._online.heads.get(self.block)
        if size is not None:
            query, key = rotated(query, size), rotated(key, size)
        if self._rounded.kept is not None:
            of_keys, of_values = self._rounded.kept.of_block(self.block)
            key, value = of_keys.apply(key), of_values.apply(value)
        return (query, key, value, *more)
