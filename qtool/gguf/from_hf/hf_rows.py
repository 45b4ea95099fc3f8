"""Rows of a GGUF tensor read from the checkpoint's tensors that it is made of.

A range of rows becomes row numbers in the checkpoint, sorted and read in runs, each with one ranged
read; nothing outside the range is touched, and memory is twice the range at most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.errors import OTHER_MODEL, FormatError, UnsupportedError
from qtool.formats import safetensors_file as st
from qtool.formats.safetensors_file import TensorInfo
from qtool.gguf.from_hf.cuts import Cut, Stretch, cut_out
from qtool.gguf.from_hf.row_maps import Factor, RowMap, Rows
from qtool.gguf.from_hf.value_maps import ValueMap
from qtool.gguf_types import BF16, F16, F32, BlockType
from qtool.streaming.finite import beyond

_PIECE = 1 << 24  # bytes compared at a time
# F64 is read as F32, as convert_hf_to_gguf.py does.
TYPES = {"F32": F32, "F16": F16, "BF16": BF16, "F64": F32}


@dataclass(frozen=True)
class HfRows:
    """One tensor, or several of one shape and dtype stacked; rows are counted through all."""

    parts: tuple[tuple[Stretch, TensorInfo], ...]
    shape: tuple[int, ...]  # of the GGUF tensor
    type: BlockType  # of the GGUF tensor: the checkpoint's, or F32
    rows: RowMap | None = None
    groups: int = 1
    add: int = 0
    wide: bool = False  # `add` to float32, whatever the dtype
    values: ValueMap | None = None
    columns: Rows | None = None  # which of the checkpoint's each is
    factors: tuple[Factor, ...] = ()  # that numbers are multiplied by, one after another
    cut: Cut | None = None  # what `parts` are of the checkpoint's, where they are not they
    file_of: Callable[[str], Path] | None = None  # a tensor

    @property
    def _info(self) -> TensorInfo:
        return self.parts[0][1]

    @property
    def growth(self) -> Factor | None:
        """What rows are multiplied by in all."""
        return reduce(np.multiply, self.factors) if self.factors else None

    @property
    def _width(self) -> int:
        """Elements of a row; of a vector that is rearranged, each element is a row."""
        return 1 if self.rows is not None and len(self.shape) == 1 else self.shape[-1]

    @property
    def _total(self) -> int:
        return prod(self.shape) // self._width if self._width else 0

    @property
    def order(self) -> Callable[[Rows], Rows] | None:
        """Numbers of GGUF rows -> those in all parts, one after another."""
        return None if self.rows is None else self.rows.order(self.groups, self._total)

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """GGUF rows first to last -> uint8 [last - first, bytes of a row]."""
        if self._width != self.shape[-1]:
            raw = self._raw(0, self._total) if last > first else np.empty((0, 1), np.uint8)
        else:
            raw = self._raw(first, last)
        if self.columns is not None:
            items = raw.reshape(len(raw), self._width, -1)
            raw = np.ascontiguousarray(items[:, self.columns]).reshape(len(raw), -1)
        kept = TYPES[self._info.dtype] == self.type and self._info.dtype != "F64"
        if not kept or self.add or self.values is not None:
            raw = self._as_float32(raw)
        if self.factors:
            raw = self._grown(raw.view(np.float32).reshape(last - first, -1), first)
        return raw.reshape(last - first, self.type.row_bytes(self.shape[-1]))

    def _as_float32(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        shape = (raw.size // st.DTYPE_BYTES[self._info.dtype],)
        flat = raw.reshape(-1)
        if self.add and self._info.dtype == "F16" and not self.wide:
            # convert_hf_to_gguf.py adds in the checkpoint's precision; bfloat16 it widens first.
            values = (flat.view(np.float16) + np.float16(self.add)).astype(np.float32)
        else:
            values = st.to_float32(flat, self._info.dtype, shape) + np.float32(self.add)
            if self._info.dtype == "F64" and np.isinf(values).any():
                self._refuse_beyond()
        if self.values is not None:
            values = self._stored(values)
        return values.view(np.uint8)

    def _refuse_beyond(self) -> None:
        """SourceError where a number of the checkpoint's is beyond float32."""
        for stretch, info in self.parts:
            where = "" if self.file_of is None else f"{self.file_of(info.name)}: "
            if (error := beyond(info, stretch, where)) is not None:
                raise error

    def _grown(self, values: NDArray[np.float32], first: int) -> NDArray[np.uint8]:
        """Rows from `first` on, multiplied."""
        for factor in self.factors:
            values = values * (factor if len(factor) == 1 else factor[first:][: len(values), None])
            if self._info.dtype == "F16":
                values = values.astype(np.float16).astype(np.float32)
        return values.view(np.uint8)

    def _stored(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        assert self.values is not None
        found = self.values.forward(values)
        if self._info.dtype == "F16":  # convert_hf_to_gguf.py stays in the checkpoint's precision
            found = found.astype(np.float16).astype(np.float32)
        return found

    def _raw(self, first: int, last: int) -> NDArray[np.uint8]:
        wanted = np.arange(first, last, dtype=np.int64)
        if self.order is not None:
            wanted = self.order(wanted)
        elif len(self.parts) == 1:
            return self._run(0, first, last)
        order = np.argsort(wanted, kind="stable")
        there = np.concatenate([*self._runs(wanted[order])]) if len(order) else self._run(0, 0, 0)
        found = np.empty_like(there)
        found[order] = there
        return found

    def _runs(self, rows: Rows) -> list[NDArray[np.uint8]]:
        """Sorted row numbers, read in as few reads as they lie in runs of neighbours."""
        each = prod(self._info.shape) // self._width
        breaks = (np.diff(rows) != 1) | (rows[1:] % each == 0)
        ends = [*(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
        starts = [0, *ends[:-1]]
        return [
            self._run(int(rows[a]) // each, int(rows[a]) % each, int(rows[a]) % each + b - a)
            for a, b in zip(starts, ends, strict=True)
        ]

    def _run(self, part: int, first: int, last: int) -> NDArray[np.uint8]:
        stretch, info = self.parts[part]
        size = self._width * st.DTYPE_BYTES[info.dtype]
        return stretch(first * size, last * size).reshape(last - first, size)


def whole_rows(stretch: Stretch, info: TensorInfo) -> Callable[[int, int], NDArray[np.uint8]]:
    """The rows of a matrix of integers, as int32; read() refuses those below zero."""
    kinds = {"I64": np.int64, "I32": np.int32}
    if info.dtype not in kinds or len(info.shape) != 2 or 0 in info.shape:
        raise FormatError(
            f"{info.name} is {info.dtype} {list(info.shape)}, expected a matrix of integers"
        )
    size = info.nbytes // info.shape[0]

    def read(first: int, last: int) -> NDArray[np.uint8]:
        found = stretch(first * size, last * size).view(kinds[info.dtype])
        numbers = found.astype(np.int32)
        if not np.array_equal(numbers, found) or (numbers < 0).any():
            raise FormatError(
                f"{info.name} holds {found.min()} to {found.max()}, expected numbers from 0 on, of "
                "32 bits"
            )
        return numbers.view(np.uint8).reshape(last - first, -1)

    return read


def padded(rows: HfRows, total: int) -> Callable[[int, int], NDArray[np.uint8]]:
    """A matrix's rows, and zeros behind them up to `total`."""
    own = rows.shape[0]

    def read(first: int, last: int) -> NDArray[np.uint8]:
        found = np.zeros((last - first, rows.type.row_bytes(rows.shape[-1])), np.uint8)
        if first < own:
            there = rows.read(first, min(last, own))
            found[: len(there)] = there
        return found

    return read


def same_bytes(one: tuple[Stretch, TensorInfo], other: tuple[Stretch, TensorInfo]) -> bool:
    """Whether two tensors are the same to the byte; read in pieces, up to the first difference."""
    first, second = one[1], other[1]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    for at in range(0, first.nbytes, _PIECE):
        size = min(_PIECE, first.nbytes - at)
        a, b = (stretch(at, at + size) for stretch, _ in (one, other))
        if not np.array_equal(a, b):
            return False
    return True


def hf_rows(
    parts: Sequence[tuple[Stretch, TensorInfo]],
    *,
    stacked: bool,
    float32: bool,
    rows: RowMap | None,
    groups: int,
    add: int,
    values: ValueMap | None = None,
    columns: Rows | None = None,
    squeezed: bool = False,
    cut: Cut | None = None,
    folded: tuple[int, ...] | None = None,
    factors: tuple[Factor, ...] = (),
    joined: int = 0,
    file_of: Callable[[str], Path] | None = None,
) -> HfRows:
    """Rows of these tensors; errors name the tensor that has another dtype or shape than needed."""
    if cut is not None:
        parts = [cut_out(stretch, info, cut) for stretch, info in parts]
    first = parts[0][1]
    for _, info in parts:
        if info.dtype not in TYPES:
            raise UnsupportedError(
                f"{info.name} is {info.dtype}; GGUF is written from float32, float16 and bfloat16"
            )
        shorter = bool(joined) and info is parts[-1][1] and info.shape[1:] == first.shape[1:]
        if info.dtype != first.dtype or (info.shape != first.shape and not shorter):
            raise FormatError(
                f"{info.name} is {info.dtype} {list(info.shape)}, and {first.name}, with which it "
                f"is stacked, {first.dtype} {list(first.shape)}"
            )
        if not info.shape or 0 in info.shape:
            raise FormatError(f"{info.name} has the shape {list(info.shape)} and holds no rows")
    own = first.shape
    if squeezed and len(own) == 3 and own[1] == 1:
        own = (own[0], own[2])
    shape = (len(parts), *own) if stacked else own
    if joined:
        shape = (sum(info.shape[0] for _, info in parts), *own[1:])
        if shape[0] != joined:
            raise FormatError(
                f"{first.name} and those after it have {shape[0]} rows, and by the settings of "
                f"config.json they should have {joined}; {OTHER_MODEL}"
            )
    if columns is not None and shape[-1] != len(columns):
        raise FormatError(
            f"{first.name} has the shape {list(shape)}, and by the settings of config.json its "
            f"rows should hold {len(columns)} numbers; {OTHER_MODEL}"
        )
    if rows is not None:
        shape = _rearranged(first, shape, rows, groups)
    if folded is not None and prod(folded) == prod(shape):
        shape = folded
    factors = factors if any((factor != 1).any() for factor in factors) else ()
    type_ = F32 if float32 or factors or len(shape) == 1 else TYPES[first.dtype]
    return HfRows(
        tuple(parts),
        shape,
        type_,
        rows,
        groups,
        add,
        values=values,
        columns=columns,
        factors=factors,
        cut=cut,
        file_of=file_of,
    )


def _rearranged(
    info: TensorInfo, shape: tuple[int, ...], rows: RowMap, groups: int
) -> tuple[int, ...]:
    """The shape in the GGUF file; FormatError unless the rows fall into whole groups."""
    total = shape[0] if len(shape) == 1 else prod(shape[:-1])
    if rows.taken is not None:
        if len(shape) > 2 or total != rows.taken[0]:
            raise FormatError(
                f"{info.name} has the shape {list(shape)}, and by the settings of config.json it "
                f"should have {rows.taken[0]} rows; {OTHER_MODEL}"
            )
        return (rows.taken[1], *shape[1:])
    unit = groups * rows.unit * rows.share
    if total % unit or (rows.share > 1 and (len(shape) != 3 or shape[0] != groups)):
        raise FormatError(
            f"{info.name} has the shape {list(shape)}, and its rows should fall into {groups} "
            f"({rows.groups}) times a multiple of {rows.unit * rows.share}; config.json belongs to "
            "another checkpoint"
        )
    return shape if rows.share == 1 else (shape[0], shape[1] // rows.share, shape[2])
