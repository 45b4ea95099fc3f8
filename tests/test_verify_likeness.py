"""Tiles of a matrix that are as far off as damage: GPTQ takes a few so far, by how many bits."""

import numpy as np
import pytest

from qtool.verification import likeness


def torn(tiles: int, expected: float) -> int:
    """What is told of a matrix of 200 tiles of 256 x 8, so many of them far off."""
    squares = np.ones((256, 1600), np.float32)
    left = np.full_like(squares, expected**2)
    left[:, : 8 * tiles] = 4.0
    return likeness._torn(squares, left, (256, 8), 0.95**2, expected, 1e-6)


@pytest.mark.parametrize(
    ("tiles", "expected", "told"),
    [(0, 0.1, 0), (1, 0.1, 1), (6, 0.31, 0), (7, 0.31, 7), (200, 0.31, 200)],
)
def test_a_few_tiles_are_chance_where_bits_are_few(tiles: int, expected: float, told: int) -> None:
    assert torn(tiles, expected) == told


def test_more_are_chance_of_a_larger_matrix() -> None:
    assert likeness.most_by_chance(40_000, 0.1) == 80
    assert likeness.most_by_chance(40_000, 0.31) == 1200
