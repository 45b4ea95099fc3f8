"""How a tensor is stored: quantized under a Scheme, left dense, or dropped, with the reason.

`GroupQuant` is the in-memory form of every quantization whose codes stand for themselves:

    w[o, k] = value(codes[o, k]) * scale        in float32

`value` is code - zero for integers, and the number that the code's bits spell for the small
floats e4m3, e5m2 (one byte) and e2m1 (four bits). Codes that share a scale are a run of columns of
one row, or of `rows` rows. AWQ, GPTQ, compressed-tensors, FP8 and bitsandbytes files are packings
of it. With codes of at most 8 bits and a float16 scale the product is exact in float32, so every
reader must agree with `dequantize` bit for bit.

Some formats have a second scale, `outer`, one number for the matrix or one for each row:

    divides       value * (scale / outer)      compressed-tensors' weight_global_scale
    multiplies    value * (scale * outer)      modelopt's weight_scale_2
    after         (value * scale) * outer      bitsandbytes, whose outer is always 1/127
    rows          (value * scale) * outer      QServe: whole scales of groups in each row's scale;
                                               in any order, since every product is exact

MLX stores what a zero makes of its scale, as precisely as its dtype has it:

    offset       code * scale + offset        offset = -(zero * scale), rounded as scales are
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

_FOUR_BIT = {"float8_e4m3": "nvfp4", "e8m0": "mxfp4"}


@dataclass(frozen=True)
class Scheme:
    """Codes and the grid they lie on.

    group_size counts input features that share a scale; -1 is all of them. rows counts output
    features that do: 1, a number for square blocks, or -1 for all of them.
    """

    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: str = "float16"  # as stored: float16, bfloat16, float32, float8_e4m3, e8m0, int8
    book: str = "int"
    rows: int = 1
    outer: str = ""  # divides, multiplies, after, rows, offset; or there is none

    def groups(self, in_features: int) -> int:
        """Number of groups in a row of in_features."""
        size = self.group_size if self.group_size > 0 else in_features
        return -(-in_features // size)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the scales of a matrix [out, in]."""
        rows, columns = shape
        return -(-rows // (self.rows if self.rows > 0 else rows)), self.groups(columns)

    @property
    def is_float(self) -> bool:
        """Whether codes are small floats and have no zero."""
        return self.book != "int"

    @property
    def by_rows(self) -> bool:
        """Whether rows, or blocks of rows, are rounded each by itself, but for a scale of all."""
        return self.rows > 0 and self.outer != "rows"

    def __str__(self) -> str:
        group = f"g{self.group_size}" if self.group_size > 0 else "channel"
        if self.rows != 1:
            group = "tensor" if self.rows < 0 else f"{self.rows}x{self.group_size}"
        if self.outer == "rows":
            return f"w{self.bits} {group} qoq"
        if not self.is_float:
            return f"w{self.bits} {group} {'sym' if self.symmetric else 'asym'}"
        if self.bits == 4:
            return f"{_FOUR_BIT.get(self.scale_dtype, 'fp4')} {group}"
        return f"{'mxfp8' if self.scale_dtype == 'e8m0' else 'fp8'} {self.book} {group}"


@dataclass(frozen=True)
class Dense:
    """Copied in its own dtype; its values change only where a transform folds a scale into it."""

    reason: str


@dataclass(frozen=True)
class Dropped:
    """Not in the artifact."""

    reason: str


Action = Scheme | Dense | Dropped  # what becomes of a source tensor
UNROUNDED = Dense("the recipe quantizes nothing (method: none)")


@dataclass(frozen=True)
class GroupQuant:
    """One quantized matrix. `g_idx` is None where column k belongs to group k // group_size."""

    scheme: Scheme
    codes: NDArray[np.uint8]  # [out, in]; the bits of small floats
    scale: NDArray[np.floating]  # scheme.grid(shape): [out, groups] unless rows is not 1; in the
    # stored dtype, or in float32 where numpy has none like it
    zero: NDArray[np.uint8]  # likewise, 0 .. 2^bits - 1; zeros for small floats
    g_idx: NDArray[np.int32] | None = None  # [in]
    outer: float | None = None  # exact in float32
    outer_rows: NDArray[np.floating] | None = None  # [out], where the scheme's outer is rows
    # [out, groups] where it is offset, and zeros, then the nearest ones, do not give it.
    offset: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, index: slice | NDArray[np.integer]) -> GroupQuant:
        """Some rows of it, each with scales of its own."""
        count, size = self.shape[0], self.scheme.rows
        of_grid = np.arange(count)[index] // (size if size > 0 else count)
        return replace(
            self,
            scheme=replace(self.scheme, rows=1),
            codes=self.codes[index],
            scale=self.scale[of_grid],
            zero=self.zero[of_grid],
            outer_rows=None if self.outer_rows is None else self.outer_rows[index],
            offset=None if self.offset is None else self.offset[index],
        )

    def group_index(self) -> NDArray[np.int32]:
        """The group of each column, int32 [in]."""
        if self.g_idx is not None:
            return self.g_idx
        columns = self.codes.shape[1]
        size = self.scheme.group_size if self.scheme.group_size > 0 else columns
        return np.arange(columns, dtype=np.int32) // np.int32(size)

    def row_scale(self) -> NDArray[np.float32]:
        """The scales with what `outer` makes of them, one row for each output, float32."""
        scale = self.scale.astype(np.float32)
        if self.outer is not None and self.scheme.outer == "divides":
            scale = scale / np.float32(self.outer)
        if self.outer is not None and self.scheme.outer == "multiplies":
            scale = scale * np.float32(self.outer)
        if self.outer_rows is not None:
            scale = scale * self.outer_rows.astype(np.float32)[:, None]
        return self._rows(scale)

    def row_offset(self) -> NDArray[np.float32]:
        """What a scheme with offsets adds, float32 [out, groups]."""
        if self.offset is not None:
            return self.offset
        return rounded(-self.scaled_zeros(), self.scheme.scale_dtype)

    def scaled_zeros(self) -> NDArray[np.float32]:
        """Zeros times scales, float32 [out, groups]: exact where scales have 16 bits."""
        product: NDArray[np.float32] = self.zero.astype(np.float32)
        with np.errstate(invalid="ignore"):  # an infinite scale: checks tell of it
            product *= self.scale.astype(np.float32)
        return product

    def with_nearest_zeros(self) -> GroupQuant:
        """One with offsets as (code - zero) * scale, of positive scales: the same numbers where
        `has_whole_zeros`."""
        down = self.scale < 0  # there codes count the other way
        most = np.uint8((1 << self.scheme.bits) - 1)
        zero = np.where(down, most - self.zero, self.zero)
        codes = np.where(down[:, self.group_index()], most - self.codes, self.codes)
        scheme = replace(self.scheme, outer="")
        return replace(
            self, scheme=scheme, codes=codes, zero=zero, scale=np.abs(self.scale), offset=None
        )

    def has_whole_zeros(self) -> bool:
        """Whether its offsets are zeros times scales to the last bit, and codes times scales, which
        have 16 bits, are not rounded."""
        if self.scheme.scale_dtype == "float32":
            return False
        return bool(np.array_equal(self.row_offset(), -self.scaled_zeros()))

    def row_zero(self) -> NDArray[np.uint8]:
        """The zeros, one row for each output."""
        zero: NDArray[np.uint8] = self._rows(self.zero)
        return zero

    def _rows(self, grid: NDArray[Any]) -> NDArray[Any]:
        if self.scheme.rows == 1:
            return grid
        rows = self.codes.shape[0]
        size = self.scheme.rows if self.scheme.rows > 0 else rows
        return grid[np.arange(rows) // size]

    def dequantize(self) -> NDArray[np.float32]:
        """The definition: float32 [out, in]."""
        index = self.group_index()
        if self.scheme.is_float:
            from qtool.float_codes import TABLES

            value = TABLES[self.scheme.book][self.codes]
        elif self.scheme.outer == "offset":
            value = self.codes.astype(np.float32)
            value *= self.scale.astype(np.float32)[:, index]
            value += self.row_offset()[:, index]
            return value
        else:
            value = self.codes.astype(np.float32)
            value -= self.row_zero().astype(np.float32)[:, index]
        value *= self.row_scale()[:, index]
        if self.scheme.outer == "after" and self.outer is not None:
            value *= np.float32(self.outer)
        return value


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Rounded to nearest even as float16, bfloat16 or float32 holds it; too large is infinite."""
    if dtype == "bfloat16":
        words = np.ascontiguousarray(values).view(np.uint32)
        words = words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
        halves: NDArray[np.float32] = (words & np.uint32(0xFFFF0000)).view(np.float32)
        return halves
    with np.errstate(over="ignore"):
        return values.astype(np.dtype(dtype)).astype(np.float32)


def joined(parts: Sequence[GroupQuant]) -> GroupQuant:
    """Rows of one matrix, a part after another: of one scheme, of one order of columns, and of one
    scale of the whole matrix, where there is one. Blocks of rows are in no two parts."""
    first = parts[0]
    assert first.scheme.rows > 0 and all(part.outer == first.outer for part in parts)

    def optional(found: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
        there = [one for one in found if one is not None]
        return np.concatenate(there) if there else None

    return replace(
        first,
        codes=np.concatenate([part.codes for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        zero=np.concatenate([part.zero for part in parts]),
        outer_rows=optional([part.outer_rows for part in parts]),
        offset=optional([part.offset for part in parts]),
    )
