"""Schemes of small floats, and the nearest of each by search."""

import numpy as np
from numpy.typing import NDArray

from qtool.float_codes import TABLES
from qtool.recipe.recipe import load
from qtool.scheme import Scheme

FP8 = {
    "tensor": Scheme(8, -1, True, "float32", "e4m3", -1),
    "channel": Scheme(8, -1, True, "bfloat16", "e4m3"),
    "group": Scheme(8, 24, True, "float16", "e4m3"),
    "block": Scheme(8, 128, True, "bfloat16", "e4m3", 128),
    "e5m2": Scheme(8, -1, True, "float32", "e5m2"),
}
NVFP4 = load("nvfp4").scheme
MXFP4 = load("mxfp4").scheme
MXFP8 = load("mxfp4", ["weights.type=mxfp8", "weights.bits=8"]).scheme


def weights(rows: int = 200, columns: int = 288, seed: int = 0) -> NDArray[np.float32]:
    """Normal numbers; a row and a group of zeros, a large and a tiny row."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((rows, columns)).astype(np.float32)
    found[3] = 0
    found[4, :96] = 0
    found[5] *= 1e5
    found[6] *= 1e-6
    return found


def nearest(values: NDArray[np.float64], book: str) -> NDArray[np.float64]:
    """The nearest number of a code book, by trying all of them."""
    numbers = np.unique(TABLES[book][np.isfinite(TABLES[book])].astype(np.float64))
    place = np.clip(np.searchsorted(numbers, values), 1, numbers.size - 1)
    low, high = numbers[place - 1], numbers[place]
    return np.where(values - low <= high - values, low, high)


def tops(weight: NDArray[np.float32], scheme: Scheme) -> NDArray[np.float64]:
    """max|w| of each weight's own grid."""
    rows, columns = weight.shape
    height = rows if scheme.rows < 0 else scheme.rows
    width = columns if scheme.group_size < 0 else scheme.group_size
    found = np.empty(weight.shape)
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            part = np.s_[row : row + height, column : column + width]
            found[part] = np.abs(weight[part]).max()
    return found
