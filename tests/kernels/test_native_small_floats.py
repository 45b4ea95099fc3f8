"""Scales, codes and numbers of small floats in C: the definition's to the bit, on every instruction
set."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.float_codes import TABLES
from qtool.native import small_floats
from qtool.native.small_floats import Tries
from support.kernels import small_float_definitions as define
from support.kernels.isas import isa_restored, isas

__all__ = ["isa_restored"]

Floats = NDArray[np.float32]
FURTHER = tuple(step for step in range(-6, 6) if step)
KINDS: list[tuple[str, int, dict[str, Any], float]] = [
    ("e2m1", 16, {"steps": FURTHER}, 23.5), ("e2m1", 16, {"steps": (1, -1)}, 1.0),
    ("e2m1", 32, {"factors": (2.0, 0.5)}, 1.0), ("e4m3", 32, {"factors": (2.0,)}, 1.0),
    ("e5m2", 32, {"factors": (2.0,)}, 1.0), ("e4m3", 7, {"factors": (0.5, 1.5)}, 3.0),
    ("e2m1", 256, {"steps": (5, -200, 200)}, 0.25),
]  # fmt: skip
SHAPES = [(1, 16), (5, 80), (3, 1000), (19, 512), (2, 4100)]


def some_weights(rows: int, columns: int) -> Floats:
    """Ordinary ones, large and tiny ones, zeros of both signs, and ties of codes."""
    rng = np.random.default_rng(rows * columns)
    weight = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(0.05)
    weight[:, ::17] *= 40
    weight[:, 5::29] = rng.integers(-12, 13, weight[:, 5::29].shape) / 16
    weight[:, 3::31] = -0.0
    weight[0, :9] = [0, 1e-38, -1e-42, 1e30, -1e30, 3e38, 448, -464, 6]
    weight[-1, : columns // 3] *= np.float32(1e-30)
    return weight


def some_scales(shape: tuple[int, int], on_ladder: bool) -> Floats:
    rng = np.random.default_rng(shape[1])
    if on_ladder:
        return TABLES["e4m3"][rng.integers(1, 127, shape)]
    return np.ldexp(np.float32(1), rng.integers(-127, 20, shape)).astype(np.float32)


@pytest.mark.parametrize(("book", "size", "tries", "outer"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_are_the_definitions(
    book: str, size: int, tries: dict[str, Any], outer: float, shape: tuple[int, int]
) -> None:
    weight = some_weights(*shape)
    importance = np.random.default_rng(3).random(shape[1]).astype(np.float32)
    first = some_scales((shape[0], -(-shape[1] // size)), "steps" in tries)
    for weighed in (None, importance):
        want = define.best_scales(
            weight, first, book, size, outer=outer, importance=weighed, **tries
        )
        with np.errstate(over="ignore"):
            codes = define.codes_of(weight, want, book, size, outer)
            numbers = define.rounded(weight, want, book, size, outer)
        if weighed is None and shape[1] > 500:
            assert (want != first).any()
        for isa in isas():
            scale = first.copy()
            small_floats.best_scales(
                weight, scale, book, size, Tries(**tries),
                outer=outer, importance=weighed, threads=2,
            )  # fmt: skip
            assert scale.tobytes() == want.tobytes(), isa
            found = small_floats.codes_of(weight, scale, book, size, outer=outer, threads=2)
            assert found.tobytes() == codes.tobytes(), isa
            values = small_floats.rounded(weight, scale, book, size, outer=outer)
            assert values.tobytes() == numbers.tobytes(), isa


def test_one_scale_for_rows_of_any_width() -> None:
    weight = some_weights(3, 1111)
    scale = np.array([[0.5], [2.0], [2.0**-20]], np.float32)
    want = define.codes_of(weight, scale, "e4m3", 1111, 1.0)
    for isa in isas():
        assert small_floats.codes_of(weight, scale, "e4m3", 1111).tobytes() == want.tobytes(), isa


def test_what_does_not_fit_is_refused() -> None:
    weight, scale = np.ones((2, 600), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="expected 256 at most"):
        small_floats.best_scales(weight, scale, "e4m3", 300, Tries(factors=(2.0,)))
    with pytest.raises(ValueError, match="scale"):
        small_floats.codes_of(weight, scale, "e4m3", 16)
    with pytest.raises(ValueError, match="group_size is 0"):
        small_floats.codes_of(weight, scale, "e4m3", 0)
    assert small_floats.codes_of(weight[:0], scale[:0], "e4m3", 300).shape == (0, 600)
