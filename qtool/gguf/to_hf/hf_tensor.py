"""One tensor of a GGUF file, or several, as those of a checkpoint that they become."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from qtool.errors import UnsupportedError
from qtool.formats.safetensors_header import TensorSpec
from qtool.gguf.architectures.modules import Module
from qtool.gguf.source import SourceTensor, as_floats
from qtool.gguf.to_hf.joined import Part
from qtool.gguf_types import BF16, F16, F32, BlockType
from qtool.native import floats

_AT_ONCE = 1 << 22  # numbers that are float32 in memory
PLAIN = {F16: "F16", BF16: "BF16", F32: "F32"}


@dataclass(frozen=True)
class HfTensor:
    """One GGUF tensor, and the tensors of the checkpoint that it becomes; or one of these, and the
    GGUF tensors that it is put together of."""

    source: SourceTensor  # or as if the file had the whole
    module: Module
    groups: int  # heads or experts that its rows fall into
    specs: tuple[TensorSpec, ...]  # one, or one per expert
    parts: tuple[Part, ...] = ()

    @property
    def in_file(self) -> tuple[SourceTensor, ...]:
        """The file's own tensors."""
        return tuple(part.tensor for part in self.parts) or (self.source,)

    @property
    def type(self) -> BlockType:
        """How the file stores it: of several types, one in blocks."""
        return max((tensor.type_in_file for tensor in self.in_file), key=lambda one: one.weights)

    def arrays(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Each tensor's name and bytes."""
        for number, spec in enumerate(self.specs):
            yield spec.name, self.bytes_of(number)

    def copied(self, dtype: str) -> bool:
        """Whether the file's own bytes are what is stored as this dtype; or its integers."""
        if self.module.whole:
            return True
        changed = self.module.add or self.module.values is not None or self.type.weights > 1
        return PLAIN.get(self.source.type) == dtype and not changed

    def comes_back(self, dtype: str) -> bool:
        """Whether numbers that llama.cpp stores another way give the file's own once more."""
        if self.module.values is None:
            return False
        there = floats_of(self.source, 0, self.source.rows)
        return np.array_equal(
            stored_again(taken_back(there, self.module), dtype, self.module), there
        )

    def values(self, number: int, first: int, last: int) -> NDArray[np.float32]:
        """float32 [last - first, in_features]: rows of one of the tensors."""
        start = number * prod(self.specs[0].shape[:-1]) if len(self.specs) > 1 else 0
        if self.module.whole:
            return self._integers(first, last).astype(np.float32)
        return taken_back(floats_of(self.source, start + first, start + last), self.module)

    def _integers(self, first: int, last: int) -> NDArray[np.int32]:
        raw = np.ascontiguousarray(self.source.read(first, last))
        return raw.reshape(-1).view(np.int32).reshape(last - first, -1)

    def bytes_of(self, number: int) -> NDArray[np.uint8]:
        """The bytes of one of the tensors."""
        spec = self.specs[number]
        if self.module.whole:
            numbers = self._integers(0, self.source.rows)
            return numbers.astype(np.int64).reshape(-1).view(np.uint8)
        if self.module.rearranged:
            return _stored(put_back(self.source, self.module, self.groups), spec.dtype, spec.name)
        # Vectors of several experts are rows of one tensor.
        rows = prod(spec.shape[:-1])
        start = number * rows if len(self.specs) > 1 else 0
        if self.copied(spec.dtype):
            return np.ascontiguousarray(self.source.read(start, start + rows)).reshape(-1)
        out = np.empty(spec.nbytes, np.uint8)
        width = spec.nbytes // rows
        step = max(1, _AT_ONCE // max(1, self.source.in_features))
        for first in range(0, rows, step):
            last = min(rows, first + step)
            values = self.values(number, first, last)
            out[first * width : last * width] = _stored(values, spec.dtype, spec.name)
        return out


def stored_again(values: NDArray[np.float32], dtype: str, module: Module) -> NDArray[np.float32]:
    """What the file would have of `values` stored as dtype. llama.cpp's converter adds to float16
    in float16, which gives numbers that the sum in float32 gives, too."""
    held = values
    if dtype == "F16":
        held = floats.from_float16(floats.to_float16(values))
    elif dtype == "BF16":
        held = floats.from_bfloat16(floats.to_bfloat16(values))
    if module.values is None:
        return held + np.float32(module.add)
    made = module.values.forward(held)
    return floats.from_float16(floats.to_float16(made)) if dtype == "F16" else made


def taken_back(values: NDArray[np.float32], module: Module) -> NDArray[np.float32]:
    """The checkpoint's numbers of those that llama.cpp stores."""
    if module.values is not None:
        return module.values.inverse(values)
    return values - np.float32(module.add) if module.add else values


def floats_of(tensor: SourceTensor, first: int, last: int) -> NDArray[np.float32]:
    """Rows first to last as float32 [last - first, in_features]."""
    return as_floats(tensor, np.ascontiguousarray(tensor.read(first, last)))


def put_back(tensor: SourceTensor, module: Module, groups: int) -> NDArray[np.float32]:
    """The tensor's values, float32 of its shape, as the checkpoint has them."""
    values = floats_of(tensor, 0, tensor.rows)
    if module.rows is not None:
        rows = values.reshape(-1) if len(tensor.shape) == 1 else values
        order = np.arange(len(rows), dtype=np.int64)
        values = rows[module.rows.inverse(order, groups, len(rows))]
    if module.columns is not None:
        found = np.empty_like(values)
        found[:, module.columns] = values
        values = found
    found = taken_back(values, module).reshape(tensor.shape)
    return np.ascontiguousarray(found.T) if module.transposed else found


def _stored(values: NDArray[np.float32], dtype: str, name: str) -> NDArray[np.uint8]:
    values = np.ascontiguousarray(values)
    if not np.isfinite(values).all():
        raise UnsupportedError(
            f"{name}: has numbers that are NaN or infinite: the file is damaged; fetch or make it "
            "again"
        )
    if dtype == "F32":
        return values.reshape(-1).view(np.uint8)
    if dtype == "BF16":
        return floats.to_bfloat16(values).reshape(-1).view(np.uint8)
    half = floats.to_float16(values)
    if not np.isfinite(half).all():
        raise UnsupportedError(
            f"{name}: values up to {np.abs(values).max():.3g} do not fit into float16; "
            "use --dtype bfloat16"
        )
    return half.reshape(-1).view(np.uint8)
