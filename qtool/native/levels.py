"""The GPTQ column sweep onto levels that are given."""

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qtool.native.library import address, check, library, over_rows
from qtool.native.rounding import SweepTask, check_order, group_shape

_MODE = 3  # QT_GROUPS_LEVELS
_MOST = 256

Second = Literal["any", "even", "all", "none"]
_SECOND: tuple[Second, ...] = ("any", "even", "all", "none")  # QT_SECOND_*


@dataclass(frozen=True)
class Points:
    """Codes that may stand together: those of each four or eight neighbouring columns are a row of
    `codes`, those that are of the second half of the book with half its size added.

    second: which these may be: any, an even number in each eight columns, either all of a point or
    none of it, or none, where the book has no halves. With any and even, the numbers of the second
    half are the first's, negated."""

    codes: NDArray[np.uint8]  # [points, 4 or 8], at most 2048, of the first half of the book
    second: Second

    @property
    def together(self) -> int:
        """Columns that must be taken together."""
        return 8 if self.second == "even" else self.codes.shape[1]


@dataclass(frozen=True)
class Levels:
    """What the codes of a matrix [out, in] stand for, in float32, each operation rounded:

    value = scale[row, column // width] * book[code] - offset[row, column // width]
    """

    width: int  # columns that share a scale; of the last ones there may be fewer
    scale: NDArray[np.float32]  # [out, in / width], of any sign, finite
    offset: NDArray[np.float32] | None  # [out, in / width], finite; None: zero
    book: NDArray[np.float32]  # [levels], in any order, at most 256
    points: Points | None = None  # then width is a multiple of the columns that they take together;
    # `any` and `even` take no offset

    def values(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """What codes [out, in] stand for."""
        columns = codes.shape[1]
        scale = self.scale.repeat(self.width, axis=1)[:, :columns]
        found: NDArray[np.float32] = scale * self.book[codes]
        if self.offset is not None:
            found -= self.offset.repeat(self.width, axis=1)[:, :columns]
        return found


def gptq_sweep_levels(
    weight: NDArray[Any],
    upper: NDArray[Any],
    *,
    order: NDArray[np.int32] | None = None,
    levels: Levels,
    threads: int | None = None,
) -> NDArray[np.uint8]:
    """[out, in] codes; float32 or float64 by the dtype of weight.

    weight: [out, in], not changed. upper: [in, in] of the same dtype, the upper Cholesky factor U
    of the inverse Hessian, U'U, whose rows and columns are in the order of the sweep. order: [in]
    the column taken at each step. A column becomes the level next to it; halfway between two, the
    even one of a book of consecutive integers, else the lower one of the book. Where the scale
    is zero it becomes the number of the book nearest to zero; of equal numbers, the first.

    Columns that choose among points become those for which sum (w - level)^2 / U_jj^2 is least, the
    first point of equals, of the first half of the book; `order` must take columns that depend on
    each other one after another.
    """
    dtype = weight.dtype
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"weight is {dtype}, expected float32 or float64")
    check("weight", weight, dtype, (None, None))
    out_features, in_features, width, groups = group_shape(weight, levels.width)
    check("upper", upper, dtype, (in_features, in_features))
    check_order(order, in_features)
    shape = (out_features, groups)
    check("scale", levels.scale, np.float32, shape)
    if levels.offset is not None:
        check("offset", levels.offset, np.float32, shape)
    check("book", levels.book, np.float32, (None,))
    if not 1 <= levels.book.size <= _MOST or not np.isfinite(levels.book).all():
        raise ValueError(f"book is {levels.book}, expected 1 to {_MOST} finite numbers")
    points = levels.points
    if points is not None:
        _check_points(levels, points, in_features, order)
    codes = np.empty((out_features, in_features), np.uint8)
    loss = np.empty(out_features, np.float64)
    function = getattr(library(), f"qt_gptq_sweep_f{dtype.itemsize * 8}")

    def run(first: int, last: int) -> int:
        task = SweepTask(
            rows=last - first,
            cols=in_features,
            group_size=width,
            weight=address(weight, first),
            hinv=address(upper),
            order=address(order),
            groups=_MODE,
            levels=levels.book.size,
            codes=address(codes, first),
            scale=address(levels.scale, first),
            loss=address(loss, first),
            book=address(levels.book),
            offset=address(levels.offset, first),
            **({} if points is None else _told(points)),
        )
        return int(function(ctypes.byref(task)))

    over_rows(out_features, threads, run)
    return codes


def _told(points: Points) -> dict[str, Any]:
    count, coordinates = points.codes.shape
    return {
        "point": address(points.codes),
        "points": count,
        "coordinates": coordinates,
        "second": _SECOND.index(points.second),
    }


def _check_points(
    levels: Levels, points: Points, in_features: int, order: NDArray[np.int32] | None
) -> None:
    check("points", points.codes, np.uint8, (None, None))
    signs = points.second in ("any", "even")
    unit = points.together
    if unit not in (4, 8) or in_features % unit or levels.width % unit:
        raise ValueError(
            f"where {unit} columns choose points together, expected 4 or 8 to divide in_features "
            f"and width, and these are {in_features} and {levels.width}"
        )
    if signs and levels.offset is not None:
        raise ValueError("points with signs go without an offset")
    half = levels.book.size // 2
    if signs and not np.array_equal(levels.book[:half], -levels.book[half:]):
        raise ValueError(f"book is {levels.book}, expected a second half that negates the first")
    if order is not None:
        taken = order.reshape(-1, points.together)
        if (taken[:, :1] % points.together != 0).any() or (np.diff(taken) != 1).any():
            raise ValueError(f"order parts columns that stand together, {points.together} each")
