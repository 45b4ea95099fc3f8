"""The C kernels (kernels/), bound with ctypes: numpy arrays in, numpy arrays out.

Every array is checked for shape, dtype and contiguity here before its address is passed. Rows are
split over threads (ctypes releases the interpreter lock); no result depends on the number of
threads, nor on the instruction set, which is chosen when the library is loaded.
`QTOOL_SIMD=scalar|avx2|avx512|neon` forces one, `QTOOL_LIBRARY` names another build of the library.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

import qtool
from qtool.errors import UnsupportedError

_LIBRARY = "libqtool_kernels.so"
_ERRORS = {1: "an argument is out of range", 2: "out of memory", 3: "no such instruction set"}
_SCALE_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
_ROWS_PER_TASK = 32  # a panel on every instruction set, so that threads share no panel


@dataclass(frozen=True)
class RangeSearch:
    """Tries each ratio of a group's range and keeps the one with the least sum |w - dq|^norm.

    The first of equals wins. A norm other than 2 is computed to about five digits.
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


class _Sweep(ctypes.Structure):
    _fields_ = (
        ("quantizer", _Quantizer),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("hinv", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("groups", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("loss", ctypes.c_void_p),
    )


class _Groups(ctypes.Structure):
    _fields_ = (
        ("quantizer", _Quantizer),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("gram", ctypes.c_void_p),
        ("given", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("dequantized", ctypes.c_void_p),
    )


@cache
def _library() -> ctypes.CDLL:
    """The shared library: beside the package, or in build/ of a checkout."""
    entries = [Path(entry) for entry in qtool.__path__]
    candidates = [folder / _LIBRARY for e in entries for folder in (e, e / "build")]
    if named := os.environ.get("QTOOL_LIBRARY"):
        candidates = [Path(named)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise UnsupportedError(
            f"the kernel library is not at {' or '.join(map(str, candidates))}; "
            "install the package, or run `make kernels` in a checkout"
        )
    library = ctypes.CDLL(str(found))
    library.qt_selected.restype = ctypes.c_char_p
    library.qt_available.restype = ctypes.c_char_p
    if forced := os.environ.get("QTOOL_SIMD"):
        _select(library, forced)
    return library


def _select(library: ctypes.CDLL, isa: str) -> None:
    if library.qt_select(isa.encode()) != 0:
        raise UnsupportedError(
            f"instruction set {isa!r} is not available here; "
            f"this machine has {', '.join(_available(library))}"
        )


def _available(library: ctypes.CDLL) -> list[str]:
    names: list[str] = []
    while (name := library.qt_available(len(names))) is not None:
        names.append(name.decode())
    return names


def available() -> list[str]:
    """Instruction sets of this machine that the library was built for, the best one last."""
    return _available(_library())


def selected() -> str:
    """The instruction set in use."""
    name: bytes = _library().qt_selected()
    return name.decode()


def select(isa: str) -> None:
    """Uses this instruction set from now on; UnsupportedError where it is not available."""
    _select(_library(), isa)


def default_threads() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check(
    name: str, array: NDArray[Any], dtype: DTypeLike, shape: Sequence[int | None]
) -> NDArray[Any]:
    """The array itself, if it is C-contiguous and of this dtype and shape (None: any length)."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is {type(array).__name__}, expected a numpy array")
    if array.dtype != np.dtype(dtype):
        raise TypeError(f"{name} is {array.dtype}, expected {np.dtype(dtype)}")
    wanted = tuple("any" if n is None else n for n in shape)
    if len(shape) != array.ndim or any(
        n is not None and n != have for n, have in zip(shape, array.shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {array.shape}, expected {wanted}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    return array


def _address(array: NDArray[Any] | None, row: int = 0) -> int | None:
    """Address of a row of a contiguous array."""
    return None if array is None else array.ctypes.data + row * array.strides[0]


def _over_rows(rows: int, threads: int | None, run: Callable[[int, int], int]) -> None:
    """Calls run(first, last) on ranges that cover the rows; its result is an error code."""
    threads = threads or default_threads()
    panels = -(-rows // _ROWS_PER_TASK)
    count = max(1, min(threads, panels))
    edges = [min(rows, panels * k // count * _ROWS_PER_TASK) for k in range(count + 1)]
    if count == 1:
        codes = [run(0, rows)]
    else:
        with ThreadPoolExecutor(count) as pool:
            codes = list(pool.map(run, edges[:-1], edges[1:]))
    for code in codes:
        if code == 2:
            raise MemoryError("the kernel library could not allocate its buffers")
        if code != 0:
            raise ValueError(f"the kernel library refused: {_ERRORS.get(code, code)}")


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
            self.bits, self.symmetric, dtype, len(ratios), reach, search.norm, _address(ratios)
        ), ratios

    def stored(self, scale: NDArray[Any]) -> NDArray[Any]:
        """Scales in the dtype asked for; exact, since they were rounded to it."""
        return scale.astype(np.float16 if self.scale_dtype == "float16" else np.float32)

    def check_given(
        self, given: tuple[NDArray[Any], NDArray[np.uint8]], dtype: DTypeLike, shape: list[int]
    ) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        scale = _check("given scale", given[0], dtype, shape)
        zero = _check("given zero", given[1], np.uint8, shape)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError("a given scale is not a positive finite number")
        if zero.size and int(zero.max()) >= 1 << self.bits:
            raise ValueError(f"a given zero is {zero.max()}, expected below {1 << self.bits}")
        return scale, zero


def _group_shape(weight: NDArray[Any], group_size: int) -> tuple[int, int, int, int]:
    """(out_features, in_features, group_size, groups) of a weight that has elements."""
    out_features, in_features = weight.shape
    if not out_features or not in_features:
        raise ValueError(f"weight has shape {weight.shape}, expected at least one element")
    if group_size != -1 and group_size < 1:
        raise ValueError(f"group_size is {group_size}, expected -1 or at least 1")
    size = in_features if group_size == -1 else min(group_size, in_features)
    return out_features, in_features, size, -(-in_features // size)


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
    weight = _check("weight", weight, dtype, (None, None))
    out_features, in_features, size, groups = _group_shape(weight, group_size)
    _check("hinv_upper", hinv_upper, dtype, (in_features, in_features))
    options = _Grid(bits, symmetric, scale_dtype, reach, search)
    quantizer, ratios = options.structure()
    if order is not None:
        _check("order", order, np.int32, (in_features,))
        if not np.array_equal(np.sort(order), np.arange(in_features)):
            raise ValueError(f"order is not a permutation of 0 .. {in_features - 1}")
    if importance is not None:
        _check("importance", importance, np.float32, (in_features,))

    codes = np.empty((out_features, in_features), np.uint8)
    loss = np.empty(out_features, np.float64)
    if given is None:
        mode = 1 if static_groups else 0
        scale = np.empty((out_features, groups), dtype)
        zero = np.empty((out_features, groups), np.uint8)
    else:
        mode = 2
        scale, zero = options.check_given(given, dtype, [out_features, groups])
    function = getattr(_library(), f"qt_gptq_sweep_f{dtype.itemsize * 8}")

    def run(first: int, last: int) -> int:
        task = _Sweep(
            quantizer,
            last - first,
            in_features,
            size,
            _address(weight, first),
            _address(hinv_upper),
            _address(order),
            _address(importance),
            mode,
            0,
            _address(codes, first),
            _address(scale, first),
            _address(zero, first),
            _address(loss, first),
        )
        return int(function(ctypes.byref(task)))

    _over_rows(out_features, threads, run)
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
    weight = _check("weight", weight, np.float32, (None, None))
    out_features, in_features, size, groups = _group_shape(weight, group_size)
    options = _Grid(bits, symmetric, scale_dtype, reach, search)
    quantizer, ratios = options.structure()
    if importance is not None:
        _check("importance", importance, np.float32, (in_features,))
    if gram is not None:
        _check("gram", gram, np.float32, (groups, size, size))
        if search is None or importance is not None or search.norm != 2:
            raise ValueError("gram needs a search of norm 2, and no importance")
    codes = np.empty((out_features, in_features), np.uint8)
    values = np.empty((out_features, in_features), np.float32) if dequantize else None
    if given is None:
        scale = np.empty((out_features, groups), np.float32)
        zero = np.empty((out_features, groups), np.uint8)
    else:
        scale, zero = options.check_given(given, np.float32, [out_features, groups])
    function = _library().qt_quantize_groups

    def run(first: int, last: int) -> int:
        task = _Groups(
            quantizer,
            last - first,
            in_features,
            size,
            _address(weight, first),
            _address(importance),
            _address(gram),
            given is not None,
            _address(scale, first),
            _address(zero, first),
            _address(codes, first),
            _address(values, first),
        )
        return int(function(ctypes.byref(task)))

    _over_rows(out_features, threads, run)
    del ratios  # its address was in use until here
    return Groups(codes, options.stored(scale), zero, values)
