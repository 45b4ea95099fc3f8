"""The column sweep onto given levels against a float64 loop that recomputes the inverse."""

import itertools
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import native, native_gguf
from qtool.gguf.gptq.levels import SWEPT, Levels, levels, together
from qtool.gguf_types import BY_NAME, BlockType
from qtool.native import Points
from support.kernels.hessians import Floats, factor, hessian, trace_error
from support.kernels.isas import isa_restored

__all__ = ["isa_restored"]

Order = NDArray[np.int32]
TYPES = [BY_NAME[name] for name in sorted(SWEPT)]
each_type = pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)


def normal(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@dataclass(frozen=True)
class Problem:
    """What a sweep needs to know of an input."""

    h: Floats
    order: Order | None  # strongest first

    @cached_property
    def steps(self) -> Order:
        return np.arange(len(self.h), dtype=np.int32) if self.order is None else self.order

    @cached_property
    def upper(self) -> Floats:
        return factor(self.h[np.ix_(self.steps, self.steps)])

    @cached_property
    def importance(self) -> NDArray[np.float32]:
        """As GPTQ weighs columns: 1 / U_jj^2."""
        found = np.empty(len(self.h), np.float32)
        found[self.steps] = 1 / np.diag(self.upper) ** 2
        return found

    @cached_property
    def rows(self) -> list[Floats]:
        """At each step the first row of the inverse of what is left of H."""
        found = []
        for i in range(len(self.h)):
            rest = self.steps[i:]
            found.append(np.linalg.inv(self.h[np.ix_(rest, rest)])[0])
        return found

    @cached_property
    def shares(self) -> list[Floats]:
        """At each step the share of its error that each column left takes, by the definition."""
        return [row / row[0] for row in self.rows]


def problem_of(h: Floats, ordered: bool = True, together: int = 1) -> Problem:
    strength = np.diag(h).reshape(-1, together).sum(axis=1)
    first = np.argsort(-strength, kind="stable")[:, None] * together
    order = (first + np.arange(together)).ravel().astype(np.int32)
    return Problem(h, order if ordered else None)


@cache
def problem(columns: int, seed: int, ordered: bool = True, together: int = 1) -> Problem:
    return problem_of(hessian(columns, seed), ordered, together)


def problem_for(block: BlockType, columns: int, seed: int, ordered: bool = True) -> Problem:
    return problem(columns, seed, ordered, together(block))


def level_values(found: Levels, group: int) -> NDArray[np.float32]:
    """[out, numbers of the book], what the codes of a group stand for."""
    values = found.scale[:, group, None] * found.book
    return values if found.offset is None else values - found.offset[:, group, None]


def nearest(w: Floats, values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], Floats]:
    """Codes of the nearest of values [out, levels], the first of equals, and these."""
    code = np.abs(w[:, None] - values.astype(np.float64)).argmin(1)
    return code.astype(np.uint8), values[np.arange(len(w)), code].astype(np.float64)


def nearest_points(
    w: Floats, values: NDArray[np.float32], points: Points, cost: Floats
) -> tuple[NDArray[np.uint8], Floats]:
    """Of some columns that stand together: codes for which the sum of cost times squared errors is
    least, of all points with all signs, and what they stand for."""
    half, n, rows = values.shape[1] // 2, points.codes.shape[1], np.arange(len(w))
    off = cost[:, None] * np.square(w[:, :, None] - values[:, None])  # [out, columns, levels]
    if points.second in ("all", "none"):
        whole = points.codes, points.codes + np.uint8(half)
        every = np.vstack(whole if points.second == "all" else whole[:1])
        codes = every[sum(off[:, i][:, every[:, i]] for i in range(n)).argmin(1)]
        return codes, values[rows[:, None], codes].astype(np.float64)
    if points.second == "any":  # each column has the better sign
        signs = (off[:, :, half:] < off[:, :, :half]) * np.uint8(half)
        off = np.minimum(off[:, :, half:], off[:, :, :half])
        sums = sum(off[:, i][:, points.codes[:, i]] for i in range(n))
        best = points.codes[sums.argmin(1)]
        codes = best + np.take_along_axis(signs, best[:, :, None], axis=2)[:, :, 0]
        return codes, values[rows[:, None], codes].astype(np.float64)
    signs = np.array(list(itertools.product([0, 1], repeat=n)), np.uint8)
    every = (points.codes[:, None] + signs * np.uint8(half)).reshape(-1, n)
    odd = np.tile(signs.sum(1) % 2, len(points.codes)) == 1
    least = []  # of each four or eight columns, by the parity of their signs
    for first in range(0, 8, n):
        sums = np.zeros((len(w), len(points.codes), 1))
        for i in range(n):  # of as many columns, with all of their signs: the last varies fastest
            both = [off[:, first + i][:, points.codes[:, i] + sign * half] for sign in (0, 1)]
            sums = (sums[..., None] + np.stack(both, 2)[:, :, None]).reshape(*sums.shape[:2], -1)
        sums = sums.reshape(len(w), -1)
        parts = [(sums[:, odd == parity], every[odd == parity]) for parity in (False, True)]
        places = [some.argmin(1) for some, _ in parts]
        least.append([(s[rows, at], e[at]) for (s, e), at in zip(parts, places, strict=True)])
    codes, sums = np.hstack([part[0][1] for part in least]), sum(part[0][0] for part in least)
    if n == 4:
        other = least[0][1][0] + least[1][1][0] < sums
        codes[other] = np.hstack([part[1][1] for part in least])[other]
    return codes, values[rows[:, None], codes].astype(np.float64)


def oracle(
    weight: NDArray[np.float32], found: Levels, p: Problem
) -> tuple[NDArray[np.uint8], Floats]:
    """Optimal brain quantization in a fixed order: codes and what they stand for."""
    w = weight.astype(np.float64)
    codes, values = np.zeros(w.shape, np.uint8), np.zeros(w.shape)
    unit = found.points.together if found.points is not None else 1
    for i, column in enumerate(p.steps):
        if i % unit == 0:
            columns, levels_here = p.steps[i : i + unit], level_values(found, column // found.width)
            if found.points is None:
                chosen = tuple(one[:, None] for one in nearest(w[:, column], levels_here))
            else:
                cost = np.array([1 / p.rows[k][0] for k in range(i, i + unit)])
                chosen = nearest_points(w[:, columns], levels_here, found.points, cost)
            codes[:, columns], values[:, columns] = chosen
        w[:, p.steps[i:]] -= np.outer(w[:, column] - values[:, column], p.shares[i])
    return codes, values


def sweep(
    weight: NDArray[np.float32],
    p: Problem,
    found: Levels,
    dtype: type = np.float64,
    threads: int = 1,
) -> NDArray[np.uint8]:
    return native.gptq_sweep_levels(
        weight.astype(dtype), p.upper.astype(dtype), order=p.order, levels=found, threads=threads
    )


def values_of(found: Levels, codes: NDArray[np.uint8]) -> Floats:
    """What codes [out, in] stand for."""
    groups = np.arange(codes.shape[1]) // found.width
    product = found.scale[:, groups] * found.book[codes]
    exact = product if found.offset is None else product - found.offset[:, groups]
    return exact.astype(np.float64)


def rows_of(found: Levels, rows: list[int] | slice) -> Levels:
    """The levels of these rows."""
    offset = None if found.offset is None else found.offset[rows].copy()
    return replace(found, scale=found.scale[rows].copy(), offset=offset)


def encoded(weight: NDArray[np.float32], p: Problem, block: BlockType) -> Levels:
    """The levels that llama.cpp's encoder fixes, with the importance that GPTQ gives to columns."""
    return levels(native_gguf.encode(weight, block, p.importance), block, weight.shape[1])


@each_type
@pytest.mark.parametrize("ordered", [False, True])
def test_float64_equals_the_oracle(block: BlockType, ordered: bool) -> None:
    p = problem_for(block, 256, 7, ordered)
    weight = normal(16 if together(block) == 8 else 64, 256, seed=block.number)
    found = encoded(weight, p, block)
    some = [0, 6, 11, 15] if together(block) == 8 else slice(None)  # many points, and dear
    codes, _ = oracle(weight[some], rows_of(found, some), p)
    np.testing.assert_array_equal(sweep(weight, p, found)[some], codes)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("shift", [None, 0.3])
@pytest.mark.parametrize("book", ["shuffled", "whole", "one"])
def test_any_levels_equal_the_oracle(book: str, shift: float | None, ordered: bool) -> None:
    """Rows that fill no panel, a smaller last group, scales of either sign and zero, numbers that
    occur twice, codes in any order."""
    p = problem(300, 3, ordered)
    rng = np.random.default_rng(5)
    numbers = {
        "shuffled": np.append(rng.permutation(40), [7, 7, 9]) * 0.37 - 6,
        "whole": np.arange(-3, 9),
        "one": np.array([2.5]),
    }[book].astype(np.float32)
    weight = normal(37, 300)
    scale = rng.standard_normal((37, 13)).astype(np.float32) / 4
    scale[rng.random(scale.shape) < 0.2] = 0
    offset = None if shift is None else normal(37, 13, seed=6) * np.float32(shift)
    found = Levels(24, scale, offset, numbers)
    codes, values = oracle(weight, found, p)
    got = sweep(weight, p, found)
    np.testing.assert_array_equal(values_of(found, got), values)
    alive = scale.repeat(24, axis=1)[:, :300] != 0
    np.testing.assert_array_equal(got[alive], codes[alive])
    least = np.abs(numbers).argmin()
    assert (got[~alive] == least).all()


@each_type
def test_float32_hardly_differs_from_float64(block: BlockType) -> None:
    weight = normal(128, 512)
    p = problem_for(block, 512, 1)
    found = encoded(weight, p, block)
    double = sweep(weight, p, found)
    single = sweep(weight, p, found, np.float32)
    assert np.mean(single != double) <= 1e-3
    expected = trace_error(weight, values_of(found, double), p.h)
    assert abs(trace_error(weight, values_of(found, single), p.h) / expected - 1) < 1e-4


@each_type
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_same_codes_on_every_instruction_set_and_thread_count(
    block: BlockType, dtype: type, isa_restored: None
) -> None:
    weight = normal(75, 256)
    p = problem_for(block, 256, 5)
    found = encoded(weight, p, block)
    results = []
    for isa in native.available():
        native.select(isa)
        results += [sweep(weight, p, found, dtype, threads) for threads in (1, 2, 3)]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    row = sweep(weight[70:71].copy(), p, rows_of(found, slice(70, 71)), dtype)
    np.testing.assert_array_equal(row, results[0][70:71])


@each_type
def test_without_correlations_it_is_plain_rounding(block: BlockType) -> None:
    weight = normal(8, 256)
    p, unit = problem_of(np.eye(256)), together(block)
    found = encoded(weight, p, block)
    single, double = (sweep(weight, p, found, dtype) for dtype in (np.float32, np.float64))
    np.testing.assert_array_equal(single, double)
    if unit == 8:  # many points, and dear
        weight, double, found = weight[::3], double[::3], rows_of(found, slice(None, None, 3))
    for column in range(0, 256, unit):
        values = level_values(found, column // found.width)
        w = weight[:, column : column + unit].astype(np.float64)
        if found.points is None:
            wanted = nearest(w[:, 0], values)[0][:, None]
        else:
            wanted, _ = nearest_points(w, values, found.points, np.ones(unit))
        np.testing.assert_array_equal(double[:, column : column + unit], wanted)


def test_halves_go_to_even_or_down() -> None:
    weight = np.array([[0.5, 1.5, -0.5, 2.5, 9, -9]], np.float32)
    one, p = np.ones((1, 1), np.float32), problem_of(np.eye(6))
    whole = Levels(6, one, None, np.arange(-2, 4, dtype=np.float32))
    assert sweep(weight, p, whole)[0].tolist() == [2, 4, 2, 4, 5, 0]
    other = Levels(6, one, None, np.array([3, 2, 1, 0, -1, -2.5], np.float32))
    assert sweep(weight, p, other)[0].tolist() == [3, 2, 4, 1, 0, 5]


def test_bad_arguments_are_refused() -> None:
    weight, upper = np.zeros((4, 8), np.float32), np.eye(8, dtype=np.float32)
    scale, book = np.ones((4, 2), np.float32), np.arange(4, dtype=np.float32)

    def refused(match: str, found: Levels, w: NDArray[np.floating] = weight, **more: Order) -> None:
        with pytest.raises((TypeError, ValueError), match=match):
            native.gptq_sweep_levels(w, upper, levels=found, **more)

    good = Levels(4, scale, None, book)
    assert native.gptq_sweep_levels(weight, upper, levels=good).shape == (4, 8)
    refused("weight is float16", good, weight.astype(np.float16))
    refused("upper is float32, expected float64", good, weight.astype(np.float64))
    refused("not a permutation", good, order=np.zeros(8, np.int32))
    refused("group_size is 0", Levels(0, scale, None, book))
    refused(r"scale has shape \(4, 2\), expected \(4, 3\)", Levels(3, scale, None, book))
    refused(r"offset has shape \(3, 2\)", Levels(4, scale, scale[:3], book))
    refused("book is float64", Levels(4, scale, None, book.astype(np.float64)))
    refused("expected 1 to 256 finite", Levels(4, scale, None, book[:0]))
    refused("expected 1 to 256 finite", Levels(4, scale, None, book + np.float32(np.inf)))
    refused("expected 1 to 256 finite", Levels(4, scale, None, np.ones(257, np.float32)))


def test_points_that_make_no_sense_are_refused() -> None:
    weight, upper = normal(4, 16), np.eye(16, dtype=np.float32)
    scale, codes = np.ones((4, 2), np.float32), np.array([[0, 1, 0, 0], [1, 1, 1, 1]], np.uint8)
    book = np.array([1, 3, -1, -3], np.float32)
    good = Levels(8, scale, None, book, Points(codes, "any"))

    def refused(match: str, found: Levels, order: list[int] | None = None) -> None:
        steps = None if order is None else np.array(order, np.int32)
        with pytest.raises((TypeError, ValueError), match=match):
            native.gptq_sweep_levels(weight, upper, order=steps, levels=found)

    fours = [4, 5, 6, 7, 12, 13, 14, 15, 0, 1, 2, 3, 8, 9, 10, 11]
    swept = native.gptq_sweep_levels(
        weight, upper, order=np.array(fours, np.int32), levels=good, threads=1
    )
    np.testing.assert_array_equal(swept, native.gptq_sweep_levels(weight, upper, levels=good))
    refused(
        "parts columns that stand together, 8", replace(good, points=Points(codes, "even")), fours
    )
    refused("parts columns that stand together, 4", good, [*range(2, 16), 0, 1])
    refused("signs go without an offset", replace(good, offset=scale))
    narrow = Levels(4, scale.repeat(2, axis=1), None, book, good.points)
    np.testing.assert_array_equal(
        swept, native.gptq_sweep_levels(weight, upper, levels=narrow, threads=1)
    )
    refused(
        "expected 4 or 8 to divide in_features", Levels(2, normal(4, 8), None, book, good.points)
    )
    refused("8 columns choose points", replace(narrow, points=Points(codes, "even")))
    refused("second half that negates", replace(good, book=np.abs(book)))
    refused("points is int64", replace(good, points=Points(codes.astype(np.int64), "any")))
    large = np.full((1, 4), 2, np.uint8)
    refused("refused an argument", replace(good, points=Points(large, "any")))
    refused("refused an argument", replace(good, points=Points(large + np.uint8(2), "none")))
    refused("3 columns choose points", replace(good, points=Points(codes[:, :3].copy(), "any")))
    many = np.zeros((2049, 4), np.uint8)
    refused("refused an argument", replace(good, points=Points(many, "any")))


def test_of_equal_points_and_halves_the_first_is_taken() -> None:
    """Points that occur twice, halves of the same numbers; where scales are zero, what is nearest
    to zero."""
    weight, p = normal(5, 16), problem_of(np.eye(16))
    weight[:, 8:] = 0.75  # as far from one half as from one
    scale = np.array([[1, 1]] * 4 + [[0, 0]], np.float32)
    codes = np.array([[2] * 4, [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], np.uint8)
    book = np.array([0.5, 1, 9, 0.5, 1, 9], np.float32)
    for second in ("all", "none"):
        numbers = book if second == "all" else book[:3]
        found = Levels(8, scale, None, numbers, Points(codes, second))
        got = sweep(weight, p, found)
        assert got[:, 8:].tolist() == [[0, 1] * 4] * 5 and got.max() < 2
        assert got[4, :8].tolist() == [0, 1] * 4
        moved = replace(found, offset=np.full((5, 2), -0.25, np.float32))  # to 3/4 and 5/4
        weight[:, 8:] = 1.0
        np.testing.assert_array_equal(sweep(weight, p, moved)[:, 8:], got[:, 8:])
        weight[:, 8:] = 0.75
