"""Small floats in groups, in C: scales that leave the smallest squared error, codes, and what these
stand for (kernels/round_floats.c; qtool.small_floats says what they mean)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.native.library import address, check, library, over_rows

BOOKS = {"e4m3": 0, "e5m2": 1, "e2m1": 2}
WIDEST = 256  # weights of a group whose scale is looked for


class _Floats(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("tries", ctypes.c_int32),
        ("ladder", ctypes.c_int32),
        ("book", ctypes.c_int32),
        ("outer", ctypes.c_float),
        ("codes", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Tries:
    """What is tried beside each scale: factors of it, or E4M3 numbers so many steps from it."""

    factors: Sequence[float] = ()
    steps: Sequence[int] = ()


def best_scales(
    weight: NDArray[np.float32],
    scale: NDArray[np.float32],
    book: str,
    group_size: int,
    tries: Tries,
    *,
    outer: float = 1.0,
    importance: NDArray[np.float32] | None = None,
    threads: int | None = None,
) -> None:
    """Put others for scales where these leave a smaller squared error, the first of equals.

    weight: [out, in], finite. scale: [out, groups], positive, written over; with `tries.steps` they
    are numbers of E4M3. group_size: of at most 256 columns. importance: [in] of squared errors.
    """
    factors = np.asarray(tries.factors, np.float32)
    steps = np.asarray(tries.steps, np.int32)
    task = _task(weight, scale, book, group_size, outer)
    if importance is not None:
        check("importance", importance, np.float32, (weight.shape[1],))
    if group_size > WIDEST:
        raise ValueError(f"groups are of {group_size} columns, expected {WIDEST} at most")
    task.importance, task.tries = address(importance), max(factors.size, steps.size)
    task.factors, task.steps = factors.ctypes.data, steps.ctypes.data
    task.ladder = steps.size > 0
    _run(task, weight, scale, None, None, threads)


def codes_of(
    weight: NDArray[np.float32],
    scale: NDArray[np.float32],
    book: str,
    group_size: int,
    *,
    outer: float = 1.0,
    threads: int | None = None,
) -> NDArray[np.uint8]:
    """The codes nearest to weight / (scale / outer), uint8 [out, in]."""
    codes = np.empty(weight.shape, np.uint8)
    _run(_task(weight, scale, book, group_size, outer), weight, scale, codes, None, threads)
    return codes


def rounded(
    weight: NDArray[np.float32],
    scale: NDArray[np.float32],
    book: str,
    group_size: int,
    *,
    outer: float = 1.0,
    threads: int | None = None,
) -> NDArray[np.float32]:
    """What these codes stand for, float32 [out, in]."""
    values = np.empty(weight.shape, np.float32)
    _run(_task(weight, scale, book, group_size, outer), weight, scale, None, values, threads)
    return values


def _task(
    weight: NDArray[np.float32],
    scale: NDArray[np.float32],
    book: str,
    group_size: int,
    outer: float,
) -> _Floats:
    check("weight", weight, np.float32, (None, None))
    rows, columns = weight.shape
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, expected at least 1")
    check("scale", scale, np.float32, (rows, -(-columns // group_size)))
    task = _Floats(rows, columns, group_size)
    task.book, task.outer = BOOKS[book], outer
    return task


def _run(
    task: _Floats,
    weight: NDArray[np.float32],
    scale: NDArray[np.float32],
    codes: NDArray[np.uint8] | None,
    values: NDArray[np.float32] | None,
    threads: int | None,
) -> None:
    if not weight.size:
        return
    function = library().qt_round_floats

    def run(first: int, last: int) -> int:
        part = _Floats.from_buffer_copy(task)
        part.rows = last - first
        part.weight, part.scale = address(weight, first), address(scale, first)
        part.codes = None if codes is None else address(codes, first)
        part.values = None if values is None else address(values, first)
        return int(function(ctypes.byref(part)))

    over_rows(len(weight), threads, run)
