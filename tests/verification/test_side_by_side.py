"""A matrix beside its source, some rows at a time: the sums of the whole, in little memory."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.dequantize import dequantize
from qtool.methods import rtn
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.against import side_by_side
from qtool.verification.against.fit import fit
from qtool.verification.against.likeness import sums_of
from qtool.verification.against.scaling import compare
from qtool.verification.against.side_by_side import SideBySide, rows_of_array, rows_of_quant
from qtool.verification.matrix import group_means

Floats = NDArray[np.float32]


def normal(rows: int, columns: int, seed: int = 0) -> Floats:
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 0.05
    return values.astype(np.float32)


def rounded(weight: Floats, group_size: int = 32) -> GroupQuant:
    scheme = Scheme(4, group_size, symmetric=False)
    return rtn.quantize(weight, None, scheme, rtn.Options()).quant


def reordered(quant: GroupQuant) -> GroupQuant:
    index = np.random.default_rng(1).permutation(quant.group_index())
    return replace(quant, g_idx=index.astype(np.int32))


def added(values: NDArray[np.float64], tile: tuple[int, int]) -> NDArray[np.float64]:
    down = np.add.reduceat(values, np.arange(0, values.shape[0], tile[0]), axis=0)
    return np.asarray(np.add.reduceat(down, np.arange(0, values.shape[1], tile[1]), axis=1))


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"),
    [(300, 1056, 32), (700, 96, 48), (3, 2048, -1), (257, 1100, -1), (20, 70, 7)],
)
def test_sums_are_those_of_whole_matrices(
    rows: int, columns: int, group_size: int, with_index: bool
) -> None:
    weight = normal(rows, columns)
    quant = rounded(weight, group_size)
    quant = reordered(quant) if with_index else quant
    stored, source = (m.astype(np.float64) for m in (dequantize(quant), weight))
    sums = sums_of(quant, SideBySide(quant.shape, rows_of_quant(quant), rows_of_array(weight)))
    wanted = [source * source, source * stored, (source - stored) ** 2, source - stored]
    sizes = [float(np.abs(values).sum()) for values in wanted]
    index = quant.group_index()
    for number, values in enumerate(wanted):
        for group in range(quant.scale.shape[1]):
            there = values[:, index == group].sum(axis=1)
            near = np.abs(sums.groups[number, :, group] - there)
            assert near.max() < 1e-6 * sizes[number], (number, group)
        for tile, found in zip(((1, 1024), (256, 8)), sums.tiles, strict=True):
            if number < 3:
                assert np.abs(found[number] - added(values, tile)).max() < 1e-6 * sizes[number]
    for found_sum, values in (
        (sums.whole, wanted[0]), (sums.lost, wanted[2]), (sums.stored, stored**2),
    ):  # fmt: skip
        assert found_sum == pytest.approx(values.sum(), rel=1e-5)


def test_a_fit_is_the_same_by_one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(96, 160)
    generator = np.random.default_rng(2)
    columns, rows, ratio = (
        np.exp(generator.normal(0, 0.5, n)).astype(np.float32) for n in (160, 96, 160)
    )
    quant = rounded(rows[:, None] * weight * columns)
    pair = SideBySide(quant.shape, rows_of_quant(quant), rows_of_array(weight))
    norms = {"near": columns, "far": ratio}
    whole = fit(pair, norms)
    monkeypatch.setattr(side_by_side, "_WEIGHTS", 1)
    single = fit(pair, norms)
    assert whole.norm == single.norm == "near" and whole.could == single.could
    assert whole.rows is not None and single.rows is not None
    assert np.allclose(whole.rows, single.rows, rtol=1e-5)
    assert whole.left == pytest.approx(single.left, rel=1e-5)


def test_numbers_that_float32_cannot_square_are_counted() -> None:
    weight = normal(8, 64)
    damaged = rounded(weight)
    damaged = GroupQuant(
        Scheme(4, 32, symmetric=False, scale_dtype="float32"),
        damaged.codes, damaged.scale.astype(np.float32), damaged.zero,
    )  # fmt: skip
    damaged.scale[3, 1] = 1e30
    found = compare("w", damaged, rows_of_array(weight), {})
    assert np.isfinite(found.error) and found.error > 1e28
    assert found.plain_error > 1e28


@pytest.mark.parametrize("norms", [{}, {"norm": np.full(4096, 1.5, np.float32)}])
def test_memory_does_not_grow_with_the_matrix(norms: dict[str, Floats]) -> None:
    """Beside a byte a weight of codes, which the caller has: sums, and a few rows as float32."""
    peaks = []
    for rows in (512, 2048):
        weight = normal(rows, 4096)
        quant = rounded(weight, 128)
        tracemalloc.start()
        compare("w", quant, rows_of_array(weight), norms)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 20e6 and peaks[1] - peaks[0] < 1.0 * 1536 * 4096


@pytest.mark.parametrize("factor", [1e-24, 1e-30])
def test_numbers_whose_squares_float32_loses_are_counted(factor: float) -> None:
    weight = (normal(64, 64) * np.float32(factor)).astype(np.float32)
    found = compare("w", rounded(normal(64, 64, 3)), rows_of_array(weight), {})
    assert found.wrong and found.error > 1e20
    zeros = replace(rounded(weight), scale=np.zeros((64, 2), np.float16))
    assert compare("w", zeros, rows_of_array(weight), {}).error == pytest.approx(1)


def test_what_is_no_number_beside_zeros_is_no_number() -> None:
    quant = rounded(normal(8, 64))
    quant.scale[2, 1] = np.nan
    assert np.isnan(compare("w", quant, rows_of_array(np.zeros((8, 64), np.float32)), {}).error)


def test_ragged_groups_are_cut_where_they_end() -> None:
    quant = rounded(normal(4, 70), 16)  # five groups, whose width is not 70 / 5
    index = quant.group_index()
    means = group_means(quant, quant.codes)
    for group in range(5):
        assert np.allclose(means[:, group], quant.codes[:, index == group].mean(axis=1))
