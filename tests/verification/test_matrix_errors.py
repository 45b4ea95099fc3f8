"""Errors of matrices beside their source: those that the grid explains, folds taken out, damage."""

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.dequantize import dequantize
from qtool.float_codes import encode
from qtool.methods import rtn
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.against.fit import uneven
from qtool.verification.against.scaling import compare, expected_error
from qtool.verification.against.side_by_side import rows_of_array
from qtool.verification.gguf.typical import TYPICAL

Floats = NDArray[np.float32]


def normal(rows: int, columns: int, seed: int = 0) -> Floats:
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 0.05
    return values.astype(np.float32)


def rounded(weight: Floats, bits: int = 4, symmetric: bool = False) -> GroupQuant:
    return rtn.quantize(weight, None, Scheme(bits, 32, symmetric), rtn.Options()).quant


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_to_nearest_is_what_is_expected(bits: int, symmetric: bool) -> None:
    weight = normal(64, 256)
    found = compare("w", rounded(weight, bits, symmetric), rows_of_array(weight), {})
    assert found.expected is not None
    # Symmetric codes reach one step less far up than down, which clips a little.
    assert 0.95 < found.error / found.expected < (1.25 if symmetric else 1.05)
    assert found.columns is found.rows is None and not found.off and found.explained


@pytest.mark.parametrize("book", ["e4m3", "e2m1"])
def test_small_floats_are_expected_by_their_steps(book: str) -> None:
    weight = normal(64, 256)
    size = 32
    largest = np.abs(weight.reshape(64, -1, size)).max(axis=2)
    scale = (largest / {"e4m3": 448, "e2m1": 6}[book]).astype(np.float32)
    codes = encode(weight / np.repeat(scale, size, axis=1), book)
    scheme = Scheme(8 if book == "e4m3" else 4, size, True, "float32", book)
    quant = GroupQuant(scheme, codes, scale, np.zeros_like(scale, np.uint8))
    found = compare("w", quant, rows_of_array(weight), {})
    assert found.expected is not None and 0.8 < found.error / found.expected < 1.1


def test_groups_of_one_code_explain_nothing() -> None:
    weight = normal(8, 64)
    weight[:, 32:] = 0
    quant = rounded(weight)
    quant.scale[:, 1] = 1000  # of zeros any scale is right
    assert expected_error(quant) < 1


def test_a_fold_into_a_norm_is_taken_out() -> None:
    weight, scales = normal(64, 256), np.exp(normal(1, 256, 1)[0] * 10).astype(np.float32)
    quant = rounded(weight * scales)
    found = compare(
        "w", quant, rows_of_array(weight), {"norm": scales, "other": scales[::-1].copy()}
    )
    assert found.norm == "norm" and found.plain_error > 2 * found.error
    assert found.expected is not None and found.error < 1.05 * found.expected
    assert found.columns is not None and np.array_equal(found.columns, scales)


def test_a_fold_that_is_nearly_one_factor_is_still_that_norm_s() -> None:
    weight = normal(96, 256)
    scales = (0.6 * np.exp(normal(1, 256, 1)[0])).astype(np.float32)
    quant = rounded(np.float32(1.5) * weight * scales)
    found = compare("w", quant, rows_of_array(weight), {"norm": scales})
    assert found.norm == "norm" and found.rows is not None
    assert float(np.median(found.rows)) == pytest.approx(1.5, rel=0.01)
    assert found.expected is not None and found.error < 1.05 * found.expected


def test_a_fold_of_rows_and_columns_is_taken_out() -> None:
    weight = normal(96, 256)
    columns = np.exp(normal(1, 256, 1)[0] * 10).astype(np.float32)
    rows = np.exp(normal(1, 96, 2)[0] * 10).astype(np.float32)
    found = compare("w", rounded(rows[:, None] * weight * columns), rows_of_array(weight), {})
    assert found.columns is not None and found.rows is not None and found.norm is None
    assert uneven((found.columns / columns).astype(np.float32)) < 0.02
    assert uneven((found.rows / rows).astype(np.float32)) < 0.02
    assert found.expected is not None and found.error < 1.05 * found.expected


def test_zeros_off_by_one_are_counted() -> None:
    weight = normal(64, 256)
    quant = rounded(weight)
    quant.zero[:5] += 1
    found = compare("w", quant, rows_of_array(weight), {})
    assert (found.off, found.step, found.groups) == (5 * 8, 1, 64 * 8)
    assert not found.lost_codes


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_that_were_zeroed_out_are_no_zeros_that_are_off(bits: int) -> None:
    weight = normal(64, 256)
    quant = rounded(weight, bits)
    quant.codes[:5, :128] = 0
    quant.codes[5:8, :16] = 0  # half a group
    found = compare("w", quant, rows_of_array(weight), {})
    assert found.lost_codes >= 5 * 4 and not found.off


def test_groups_that_are_off_by_chance_are_not_counted() -> None:
    """Errors as large as GPTQ's, in groups so small that some means are over half a step."""
    quant = rounded(normal(64, 2048))
    left = np.random.default_rng(1).normal(0, 1.2, quant.codes.shape) * quant.scale.repeat(32, 1)
    means = left.reshape(64, 64, 32).mean(2) / quant.scale
    assert (np.abs(means) > 0.6).sum() > 3
    found = compare("w", quant, rows_of_array((dequantize(quant) + left).astype(np.float32)), {})
    assert (found.off, found.step) == (0, 0)


def test_another_matrix_is_no_fold() -> None:
    found = compare("w", rounded(normal(64, 256, 3)), rows_of_array(normal(64, 256)), {})
    assert found.wrong and found.error > 1.3


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "TQ2_0"])
def test_the_usual_errors_of_gguf_types(name: str) -> None:
    from qtool import native_gguf
    from qtool.gguf_types import BY_NAME

    weight = normal(16, 4096)
    stored = native_gguf.encode(weight, BY_NAME[name])
    back = native_gguf.dequantize(stored, BY_NAME[name], 4096)
    error = float(np.sqrt(np.square(weight - back).sum() / np.square(weight).sum()))
    assert error == pytest.approx(TYPICAL[name], rel=0.1)
