"""Tiles of a matrix that are as far off as damage: GPTQ takes a few so far, by how many bits."""

import numpy as np
import pytest

from qtool.methods import rtn
from qtool.scheme import Scheme
from qtool.verification.against import likeness
from qtool.verification.against.side_by_side import SideBySide, rows_of_array


def torn(tiles: int, expected: float, gain: float = 0.0, left_there: float = 4.0) -> int:
    """What is told of a matrix of 200 tiles of 256 x 8, so many of them far off."""
    numbers = np.full((1, 200), 256 * 8)
    there, common, left = np.ones(200), np.ones(200), np.full(200, expected**2)
    common[:tiles], left[:tiles] = gain, left_there
    sums = np.stack([there, common, left])[:, None] * numbers
    return likeness._torn(sums, numbers, 0.95**2, expected, 1e-6, 1600)


@pytest.mark.parametrize(
    ("tiles", "expected", "told"),
    [(0, 0.1, 0), (1, 0.1, 1), (6, 0.31, 0), (7, 0.31, 7), (200, 0.31, 200)],
)
def test_a_few_tiles_are_chance_where_bits_are_few(tiles: int, expected: float, told: int) -> None:
    assert torn(tiles, expected) == told


def test_more_are_chance_of_a_larger_matrix() -> None:
    assert likeness.most_by_chance(40_000, 0.1) == 80
    assert likeness.most_by_chance(40_000, 0.31) == 1200


@pytest.mark.parametrize(("gain", "told"), [(0.0, 50), (0.4, 50), (0.9, 0), (1.1, 0), (9.0, 50)])
def test_what_gptq_adds_to_columns_leaves_their_gain(gain: float, told: int) -> None:
    """As in SmolLM2's first keys, after 1024 tokens of calibration: 18 tiles of 96."""
    assert torn(50, 0.1, gain) == told


def test_a_gain_that_was_compensated_for_does_not_hide_damage() -> None:
    """Scales of rows that were fitted make the gain of noise 1."""
    assert torn(50, 0.1, 1.0, 20.0) == 0 and torn(50, 0.1, 1.0, 100.0) == 50


@pytest.mark.parametrize(("relative", "told"), [(0.4, True), (0.6, False)])
def test_where_rounding_leaves_nothing_of_parts_none_are_told(relative: float, told: bool) -> None:
    """llm-compressor's W2A16 of SmolLM2: its scales explain an error larger than the first keys."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((256, 512)).astype(np.float32)
    stored = weight.copy()
    stored[:, :128] = 7 * rng.standard_normal((256, 128))
    quant = rtn.quantize(weight, None, Scheme(2, 64, True), rtn.Options()).quant
    size = float(np.linalg.norm(weight))
    pair = SideBySide((256, 512), rows_of_array(stored), rows_of_array(weight))
    found = likeness.likeness(quant, likeness.sums_of(quant, pair), relative * size)
    assert found is not None and (found.torn > 0) is told
