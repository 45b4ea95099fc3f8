"""Rounding kernels: the GPTQ column sweep, and groups on their own.

The arithmetic of scales, zeros and codes is that of qtool.grid, and the C sources say it again.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qtool.native.library import address, check, library, over_rows

_SCALE_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


@dataclass(frozen=True)
class RangeSearch:
    """Tries each ratio of a group's range and keeps the one with the least sum |w - dq|^norm.

    The first of equals wins. A norm other than 2 is computed to about five digits. Below half
    of the range nothing was ever chosen at 4 bits.
    """

    ratios: tuple[float, ...] = tuple(1.0 - 0.025 * step for step in range(21))
    norm: float = 2.0


@dataclass(frozen=True)
class Sweep:
    """What the column sweep found. `g_idx` is set where order and groups do not follow columns."""

    codes: NDArray[np.uint8]  # [out, in], original column order
    scale: NDArray[np.floating[Any]]  # [out, groups], float16 unless asked otherwise
    zero: NDArray[np.uint8]  # [out, groups]
    g_idx: NDArray[np.int32] | None  # [in]
    loss: NDArray[np.float64]  # [out], the diagonal of (W-Q) H (W-Q)'


class _Quantizer(ctypes.Structure):
    _fields_ = (
        ("bits", ctypes.c_int32),
        ("symmetric", ctypes.c_int32),
        ("scale_dtype", ctypes.c_int32),
        ("ratio_count", ctypes.c_int32),
        ("reach", ctypes.c_double),
        ("norm", ctypes.c_double),
        ("ratios", ctypes.c_void_p),
    )


_MATRIX = (  # what both begin with
    ("quantizer", _Quantizer),
    ("rows", ctypes.c_int64),
    ("cols", ctypes.c_int64),
    ("group_size", ctypes.c_int64),
    ("weight", ctypes.c_void_p),
)


class SweepTask(ctypes.Structure):
    """qt_sweep, as the column sweep takes it."""

    _fields_ = (
        *_MATRIX,
        ("hinv", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("groups", ctypes.c_int32),
        ("levels", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("loss", ctypes.c_void_p),
        ("book", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("point", ctypes.c_void_p),
        ("points", ctypes.c_int32),
        ("coordinates", ctypes.c_int32),
        ("second", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class _Groups(ctypes.Structure):
    _fields_ = (
        *_MATRIX,
        ("importance", ctypes.c_void_p),
        ("gram", ctypes.c_void_p),
        ("given", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("dequantized", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class _Grid:
    """The checked options that every quantizing kernel takes; keeps the ratios alive."""

    bits: int
    symmetric: bool
    scale_dtype: str
    reach: float | None
    search: RangeSearch | None

    def structure(self) -> tuple[_Quantizer, NDArray[np.float64]]:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}, expected 2 to 8")
        if self.scale_dtype not in _SCALE_DTYPES:
            wanted = ", ".join(_SCALE_DTYPES)
            raise ValueError(f"scale_dtype is {self.scale_dtype!r}, expected {wanted}")
        half = 2.0 ** (self.bits - 1)
        reach = half - 0.5 if self.reach is None else self.reach
        if not half - 1 <= reach <= half:
            raise ValueError(f"reach is {reach}, expected {half - 1} to {half}")
        search = self.search or RangeSearch((), 2.0)
        ratios = np.array(search.ratios, np.float64)
        if not ((ratios > 0) & (ratios <= 1)).all():
            raise ValueError(f"ratios are {search.ratios}, expected numbers in (0, 1]")
        if not 0 < search.norm < 16:
            raise ValueError(f"norm is {search.norm}, expected more than 0 and less than 16")
        dtype = _SCALE_DTYPES[self.scale_dtype]
        return _Quantizer(
            self.bits, self.symmetric, dtype, len(ratios), reach, search.norm, address(ratios)
        ), ratios

    def stored(self, scale: NDArray[Any]) -> NDArray[Any]:
        """Scales in the dtype asked for; exact, since they were rounded to it."""
        return scale.astype(np.float16 if self.scale_dtype == "float16" else np.float32)

    def check_given(
        self, given: tuple[NDArray[Any], NDArray[np.uint8]], dtype: DTypeLike, shape: list[int]
    ) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        scale = check("given scale", given[0], dtype, shape)
        zero = check("given zero", given[1], np.uint8, shape)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError("a given scale is not a positive finite number")
        if zero.size and int(zero.max()) >= 1 << self.bits:
            raise ValueError(f"a given zero is {zero.max()}, expected below {1 << self.bits}")
        return scale, zero


def group_shape(weight: NDArray[Any], group_size: int) -> tuple[int, int, int, int]:
    """(out_features, in_features, group_size, groups) of a weight that has elements."""
    out_features, in_features = weight.shape
    if not out_features or not in_features:
        raise ValueError(f"weight has shape {weight.shape}, expected at least one element")
    if group_size != -1 and group_size < 1:
        raise ValueError(f"group_size is {group_size}, expected -1 or at least 1")
    size = in_features if group_size == -1 else min(group_size, in_features)
    return out_features, in_features, size, -(-in_features // size)


def check_order(order: NDArray[np.int32] | None, in_features: int) -> None:
    """ValueError unless an order takes each column once."""
    if order is not None:
        check("order", order, np.int32, (in_features,))
        if not np.array_equal(np.sort(order), np.arange(in_features)):
            raise ValueError(f"order is not a permutation of 0 .. {in_features - 1}")


def gptq_sweep(
    weight: NDArray[Any],
    hinv_upper: NDArray[Any],
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    reach: float | None = None,
    order: NDArray[np.int32] | None = None,
    static_groups: bool = False,
    scale_dtype: str = "float16",
    search: RangeSearch | None = None,
    importance: NDArray[np.float32] | None = None,
    given: tuple[NDArray[Any], NDArray[np.uint8]] | None = None,
    threads: int | None = None,
) -> Sweep:
    """GPTQ's rounding, column after column; float32 or float64 by the dtype of weight.

    weight: [out, in], not changed. hinv_upper: [in, in] of the same dtype, the upper Cholesky
    factor U of the inverse Hessian, U'U, whose rows and columns are in the order of the sweep.
    group_size: -1 for one group a row; the last group may be smaller. reach: steps from zero to
    max|w| on a symmetric grid, 2^(bits-1) - 1/2 unless told. order: [in] the column taken at each
    step (act_order); groups are then runs of the order, with g_idx to tell, unless static_groups
    fixes groups and scales from the original columns. given: scale (weight's dtype) and zero,
    [out, groups] of original columns, to round with instead. importance: [in] factors of the
    search's error.
    """
    dtype = weight.dtype
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"weight is {dtype}, expected float32 or float64")
    weight = check("weight", weight, dtype, (None, None))
    out_features, in_features, size, groups = group_shape(weight, group_size)
    check("hinv_upper", hinv_upper, dtype, (in_features, in_features))
    options = _Grid(bits, symmetric, scale_dtype, reach, search)
    quantizer, ratios = options.structure()
    check_order(order, in_features)
    if importance is not None:
        check("importance", importance, np.float32, (in_features,))

    codes = np.empty((out_features, in_features), np.uint8)
    loss = np.empty(out_features, np.float64)
    if given is None:
        mode = 1 if static_groups else 0
        scale = np.empty((out_features, groups), dtype)
        zero = np.empty((out_features, groups), np.uint8)
    else:
        mode = 2
        scale, zero = options.check_given(given, dtype, [out_features, groups])
    function = getattr(library(), f"qt_gptq_sweep_f{dtype.itemsize * 8}")

    def run(first: int, last: int) -> int:
        task = SweepTask(
            quantizer,
            last - first,
            in_features,
            size,
            address(weight, first),
            address(hinv_upper),
            address(order),
            address(importance),
            mode,
            0,
            address(codes, first),
            address(scale, first),
            address(zero, first),
            address(loss, first),
        )
        return int(function(ctypes.byref(task)))

    over_rows(out_features, threads, run)
    del ratios  # its address was in use until here
    g_idx = None
    if order is not None and mode == 0:
        g_idx = np.empty(in_features, np.int32)
        g_idx[order] = np.arange(in_features, dtype=np.int32) // np.int32(size)
    return Sweep(codes, options.stored(scale), zero, g_idx, loss)


@dataclass(frozen=True)
class Groups:
    """A matrix rounded group by group."""

    codes: NDArray[np.uint8]  # [out, in]
    scale: NDArray[np.floating[Any]]  # [out, groups], float16 unless asked otherwise
    zero: NDArray[np.uint8]  # [out, groups]
    dequantized: NDArray[np.float32] | None  # [out, in]


def quantize_groups(
    weight: NDArray[np.float32],
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    reach: float | None = None,
    scale_dtype: str = "float16",
    search: RangeSearch | None = None,
    importance: NDArray[np.float32] | None = None,
    gram: NDArray[np.float32] | None = None,
    given: tuple[NDArray[np.float32], NDArray[np.uint8]] | None = None,
    dequantize: bool = False,
    threads: int | None = None,
) -> Groups:
    """Round to nearest with the full range of each group, the best searched one, or `given` ones.

    weight: [out, in]. search weighs squared errors by importance [in], or minimizes e'He with
    gram [groups, group_size, group_size], symmetric blocks of the Gram matrix's diagonal (those
    of a smaller last group stand in its first rows and columns). dequantize: also what the codes
    stand for, (codes - zero) * scale.
    """
    weight = check("weight", weight, np.float32, (None, None))
    out_features, in_features, size, groups = group_shape(weight, group_size)
    options = _Grid(bits, symmetric, scale_dtype, reach, search)
    quantizer, ratios = options.structure()
    if importance is not None:
        check("importance", importance, np.float32, (in_features,))
    if gram is not None:
        check("gram", gram, np.float32, (groups, size, size))
        if search is None or importance is not None or search.norm != 2:
            raise ValueError("gram needs a search of norm 2, and no importance")
    codes = np.empty((out_features, in_features), np.uint8)
    values = np.empty((out_features, in_features), np.float32) if dequantize else None
    if given is None:
        scale = np.empty((out_features, groups), np.float32)
        zero = np.empty((out_features, groups), np.uint8)
    else:
        scale, zero = options.check_given(given, np.float32, [out_features, groups])
    function = library().qt_quantize_groups

    def run(first: int, last: int) -> int:
        task = _Groups(
            quantizer,
            last - first,
            in_features,
            size,
            address(weight, first),
            address(importance),
            address(gram),
            given is not None,
            address(scale, first),
            address(zero, first),
            address(codes, first),
            address(values, first),
        )
        return int(function(ctypes.byref(task)))

    over_rows(out_features, threads, run)
    del ratios  # its address was in use until here
    return Groups(codes, options.stored(scale), zero, values)
