"""Steps of codes: what rounding to the nearest leaves of a matrix."""

import numpy as np
from numpy.typing import NDArray

from qtool.float_codes import TABLES
from qtool.scheme import GroupQuant
from qtool.verification.against.side_by_side import MOST_ROWS, Floats
from qtool.verification.matrix import group_means


def expected_error(quant: GroupQuant) -> float:
    """The norm of W - Q that rounding to the nearest makes: sqrt(sum step^2 / 12), where a step is
    the scale, for small floats times the distance of a code's neighbours.

    Groups with a single code count nothing: nothing was rounded there.
    """
    rows = range(0, quant.shape[0], MOST_ROWS)
    return float(np.sqrt(sum(_steps_of(quant.rows(slice(at, at + MOST_ROWS))) for at in rows)))


def _steps_of(quant: GroupQuant) -> float:
    """The sum of step^2 / 12 of rounded weights."""
    index = quant.group_index()
    scale = scales_of(quant)
    members = np.bincount(index, minlength=scale.shape[1])  # a damaged g_idx leaves groups empty
    if quant.scheme.is_float:
        counts = group_means(quant, _squares(quant.scheme.book)[quant.codes]) * members
    else:
        counts = np.broadcast_to(members, scale.shape)
    squares = scale * scale * counts
    return float(squares[~single_codes(quant)].sum() / 12)


def _squares(book: str) -> Floats:
    """For each code, the square of the mean distance to its two neighbours."""
    table = TABLES[book]
    finite = np.unique(table[np.isfinite(table)])
    gaps = np.diff(finite)
    mean = np.concatenate([gaps[:1], (gaps[1:] + gaps[:-1]) / 2, gaps[-1:]])
    at = np.searchsorted(finite, np.where(np.isfinite(table), table, 0))
    return np.asarray(np.square(mean[at]), np.float32)


def single_codes(quant: GroupQuant) -> NDArray[np.bool_]:
    """[out, groups]: groups in which every code is the same."""
    index = quant.group_index()
    groups = quant.scale.shape[1]
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=groups)
    starts = np.minimum(np.cumsum(counts) - counts, index.size - 1)
    codes = quant.codes if quant.g_idx is None else quant.codes[:, order]
    low = np.minimum.reduceat(codes, starts, axis=1)
    return np.asarray(low == np.maximum.reduceat(codes, starts, axis=1))


def steps_of(quant: GroupQuant) -> Floats:
    """Of each weight [out, in] the step that its code is rounded by."""
    scale = np.abs(scales_of(quant)).astype(np.float32)[:, quant.group_index()]
    if not quant.scheme.is_float:
        return scale
    return np.asarray(scale * np.sqrt(_squares(quant.scheme.book)[quant.codes]), np.float32)


def scales_of(quant: GroupQuant) -> NDArray[np.float64]:
    """[out, groups], with what multiplies them."""
    scale = quant.row_scale().astype(np.float64)
    if quant.scheme.outer == "after" and quant.outer is not None:
        scale *= quant.outer
    return scale
