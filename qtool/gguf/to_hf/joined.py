"""A tensor of the checkpoint put together of those that a GGUF file has in its place.

    attn_k_b [heads, latents, keys], transposed
    attn_v_b [heads, values, latents]              -> kv_b_proj [heads * (keys + values), latents]
    ffn_gate_exps, ffn_up_exps [experts, n, width] -> gate_up_proj [experts, 2 * n, width]

The inverse of what `cuts` and `row_maps` take apart. Blocks stay blocks where all parts are of one
type and none is transposed; otherwise the whole is dequantized, a matrix at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError
from qtool.gguf.architectures.modules import Module
from qtool.gguf.from_hf.row_maps import Rows
from qtool.gguf.source import SourceTensor, as_floats
from qtool.gguf_types import F32, BlockType

_WORDS = {2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of the file, in the shape that config.json gives it.

    groups: heads or experts that its rows fall into. bias: each number is a row of its own.
    """

    tensor: SourceTensor
    module: Module
    groups: int
    bias: bool = False

    @property
    def transposed(self) -> bool:
        cut = self.module.cut
        return cut is not None and cut.transposed and not self.bias

    @property
    def first(self) -> int:
        """Where it begins among the rows of each matrix."""
        return 0 if self.module.cut is None else self.module.cut.first

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns of what was cut out, before its rows were taken."""
        shape = (*self.tensor.shape, 1) if self.bias else self.tensor.shape
        rows = self.module.rows
        if rows is not None and rows.taken is not None:
            return 1, rows.taken[0], shape[-1]
        return prod(shape[:-2]), shape[-2] * (1 if rows is None else rows.share), shape[-1]

    @cached_property
    def places(self) -> tuple[Rows, Rows]:
        """Which rows of what was cut out it has, sorted, and which of its own each is."""
        total = prod(self.tensor.shape) if self.bias else self.tensor.rows
        own = np.arange(total, dtype=np.int64)
        if self.module.rows is None:
            return own, own
        there = self.module.rows.forward(own, self.groups, total)
        order = np.argsort(there, kind="stable")
        return there[order], order

    def matrix(self, number: int, plain: bool) -> tuple[Rows, NDArray[np.uint8]]:
        """Its rows in one matrix: where they lie in it, and uint8 [rows, bytes of a row].

        plain: in float32, whatever their type.
        """
        height = self.shape[1]
        there, own = self.places
        first, last = np.searchsorted(there, (number * height, (number + 1) * height))
        raw = np.concatenate([self._read(a, b, plain) for a, b in _runs(own[first:last])])
        return there[first:last] - number * height, raw

    def _read(self, first: int, last: int, plain: bool) -> NDArray[np.uint8]:
        tensor = self.tensor
        if self.bias:
            whole = as_floats(tensor, tensor.read(0, tensor.rows))
            return whole.reshape(-1, 1)[first:last].view(np.uint8)
        raw = np.ascontiguousarray(tensor.read(first, last))
        return as_floats(tensor, raw).view(np.uint8) if plain else raw


def _runs(rows: Rows) -> Iterator[tuple[int, int]]:
    """From where to where neighbours follow one another."""
    breaks = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    for start, end in zip([0, *breaks], [*breaks, len(rows)], strict=True):
        yield int(rows[start]), int(rows[start]) + end - start


@dataclass(frozen=True, eq=False)
class _Whole:
    """Matrices of height x width numbers, in rows of `type`."""

    parts: tuple[Part, ...]
    height: int
    width: int
    type: BlockType
    kept: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """See SourceTensor."""
        out = np.empty((last - first, self.type.row_bytes(self.width)), np.uint8)
        at = first
        while at < last:
            number, start = divmod(at, self.height)
            stop = min(self.height, start + last - at)
            out[at - first :][: stop - start] = self._rows(number, start, stop)
            at += stop - start
        return out

    def _rows(self, number: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows of one matrix. It is kept until its last row is read: exports ask for pieces."""
        if (start, stop) == (0, self.height):
            return self.matrix(number)
        with self.lock:
            if number not in self.kept:
                self.kept.clear()
                self.kept[number] = self.matrix(number)
            found = self.kept[number][start:stop]
            if stop == self.height:
                self.kept.clear()
            return found

    def matrix(self, number: int) -> NDArray[np.uint8]:
        """uint8 [height, bytes of a row]."""
        out = np.empty((self.height, self.type.row_bytes(self.width)), np.uint8)
        for part in self.parts:
            there, raw = part.matrix(number, plain=part.tensor.type != self.type)
            if part.transposed:
                word = _WORDS[self.type.row_bytes(1)]
                out[part.first :][: part.shape[2]].view(word)[:, there] = raw.view(word).T
            else:
                out[part.first + there] = raw
        return out


def joined(parts: Sequence[Part], name: str, where: str) -> SourceTensor:
    """The checkpoint's tensor as if the file had it; FormatError, of the file `where`, if these
    are not its parts."""
    sizes = {_stored(part) for part in parts}
    numbers = sum(prod(part.tensor.shape) for part in parts)
    matrices, height, width = next(iter(sizes))
    if len(sizes) > 1 or numbers != matrices * height * width:
        shapes = ", ".join(f"{one.tensor.name} {list(one.tensor.shape)}" for one in parts)
        raise FormatError(f"{where}: {shapes} are not the parts of one {name}")
    types = {part.tensor.type for part in parts}
    kept = len(types) == 1 and (
        parts[0].tensor.type.weights == 1 or not any(one.transposed for one in parts)
    )
    whole = _Whole(tuple(parts), height, width, types.pop() if kept else F32)
    shape: tuple[int, ...] = (matrices, height, width)
    cut = parts[0].module.cut
    if parts[0].bias:
        return SourceTensor(name, (matrices, height), F32, partial(_biases, whole))
    if (cut is not None and cut.matrices) or len(parts[0].tensor.shape) == 2:
        shape = (matrices * height, width)
    return SourceTensor(name, shape, whole.type, whole.read)


def _biases(whole: _Whole, first: int, last: int) -> NDArray[np.uint8]:
    """A row for each matrix."""
    found = whole.read(first * whole.height, last * whole.height)
    return found.reshape(last - first, -1)


def _stored(part: Part) -> tuple[int, int, int]:
    """Matrices, rows and columns of the checkpoint's tensor, as this part has it."""
    matrices, rows, columns = part.shape
    if part.transposed:
        rows, columns = columns, rows
    cut = part.module.cut
    if cut is not None and cut.height:
        rows = cut.height
    return matrices, rows, columns
