"""Matrices of normal numbers, rounded to the nearest, and what `verify --against` sees of them."""

import numpy as np
from numpy.typing import NDArray

from qtool.methods import rtn
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.against.compared import Compared
from qtool.verification.against.scaling import compare
from qtool.verification.against.side_by_side import rows_of_array

Floats = NDArray[np.float32]


def normal(seed: int, shape: tuple[int, int]) -> Floats:
    values = np.random.default_rng(seed).standard_normal(shape) * 0.05
    return values.astype(np.float32)


def rounded(weight: Floats, scheme: Scheme) -> GroupQuant:
    return rtn.quantize(weight, None, scheme, rtn.Options()).quant


def scattered(weight: Floats) -> GroupQuant:
    """Of 4 bits, in groups of 128 columns that lie anywhere."""
    columns = weight.shape[1]
    order = np.random.default_rng(1).permutation(columns)
    quant = rounded(np.ascontiguousarray(weight[:, order]), Scheme(4, 128, False))
    index = np.empty(columns, np.int32)
    index[order] = np.arange(columns) // 128
    codes = np.empty_like(quant.codes)
    codes[:, order] = quant.codes
    return GroupQuant(quant.scheme, codes, quant.scale, quant.zero, index)


def beside(quant: GroupQuant, weight: Floats) -> Compared:
    with np.errstate(all="ignore"):
        return compare("w", quant, rows_of_array(weight), {})
