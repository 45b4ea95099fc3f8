"""Round to nearest, against examples worked by hand and the definition of nearest."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.errors import UnsupportedError
from qtool.methods import rtn
from qtool.scheme import GroupQuant, Scheme
from support.methods import integer_grids

PLAIN = rtn.Options()
CLIP = rtn.Options(clip=True)


@dataclass(frozen=True)
class Given:
    """Statistics as a method sees them."""

    gram: NDArray[np.floating] | None = None


def quantized(
    weight: NDArray[np.float32], scheme: Scheme, options: rtn.Options = PLAIN
) -> GroupQuant:
    return rtn.quantize(weight, None, scheme, options).quant


def test_asymmetric_by_hand() -> None:
    # Range 0 .. 2.3 in 15 steps: 0.15332 in float16; 2.3 and 1.7 are 15 and 11 of them.
    weight = np.array([[2.3, 1.7], [3.8, -0.5]], np.float32)
    quant = quantized(weight, Scheme(4, 2, False))
    assert quant.scale[:, 0].tolist() == [np.float16(2.3 / 15), np.float16(4.3 / 15)]
    assert quant.zero[:, 0].tolist() == [0, 2]
    assert quant.codes.tolist() == [[15, 11], [15, 0]]


def test_symmetric_by_hand() -> None:
    # max|w| / 8 = 0.5: the grid is -4 .. 3.5, and +4 loses a step.
    quant = quantized(np.array([[-4.0, 4.0, 0.2, 0.3]], np.float32), Scheme(4, 4, True))
    assert quant.scale.tolist() == [[0.5]]
    assert quant.zero.tolist() == [[8]]
    assert quant.codes.tolist() == [[0, 15, 8, 9]]
    assert quant.dequantize().tolist() == [[-4.0, 3.5, 0.0, 0.5]]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [16, -1])
def test_codes_are_nearest(bits: int, symmetric: bool, group_size: int) -> None:
    weight = np.random.default_rng(bits).normal(size=(7, 48)).astype(np.float32)
    scheme = Scheme(bits, group_size, symmetric)
    quant = quantized(weight, scheme)
    assert quant.scale.shape == quant.zero.shape == (7, scheme.groups(48))
    assert quant.scale.dtype == np.float16
    index = quant.group_index()
    levels = np.arange(1 << bits, dtype=np.float64)
    points = (levels - quant.zero.astype(np.float64)[:, index, None]) * quant.scale.astype(
        np.float64
    )[:, index, None]
    nearest = np.abs(points - weight[:, :, None]).min(-1)
    assert np.abs(np.abs(quant.dequantize() - weight) - nearest).max() < 1e-6
    step = quant.scale.astype(np.float32)[:, index]
    reach = 1.01 if symmetric else 0.51  # a whole step is cut off the positive end
    assert (np.abs(quant.dequantize() - weight) <= reach * step + 1e-6).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_zero_groups_stay_zero(symmetric: bool) -> None:
    weight = np.zeros((2, 8), np.float32)
    weight[0, 4:] = [1, -2, 3, -4]
    quant = quantized(weight, Scheme(4, 4, symmetric))
    assert (quant.scale[1] == 1).all()
    assert (quant.dequantize()[weight == 0] == 0).all()


def test_tiny_weights_keep_a_scale() -> None:
    quant = quantized(np.full((1, 4), 1e-9, np.float32), Scheme(4, 4, False))
    assert quant.scale[0, 0] == np.float16(2.0**-24)
    assert (quant.dequantize() == 0).all()


def test_a_scale_beyond_float16_is_refused() -> None:
    weight = np.zeros((3, 8), np.float32)
    weight[2, 5] = 1e7
    with pytest.raises(UnsupportedError, match=r"row 2, group 1 needs .*65504"):
        quantized(weight, Scheme(4, 4, False))


def test_a_short_last_group() -> None:
    weight = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)
    quant = quantized(weight, Scheme(4, 4, False))
    alone = quantized(np.ascontiguousarray(weight[:, 8:]), Scheme(4, 4, False))
    assert quant.scale.shape == (3, 3)
    assert (quant.codes[:, 8:] == alone.codes).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_clip_is_the_best_ratio_of_each_group(symmetric: bool) -> None:
    random = np.random.default_rng(1)
    weight = random.standard_t(3, size=(9, 64)).astype(np.float32)
    gram = np.diag(random.uniform(0.1, 10, 64))
    scheme = Scheme(3, 16, symmetric)
    quant = rtn.quantize(weight, Given(gram), scheme, CLIP).quant

    def error(candidate: GroupQuant) -> NDArray[np.float64]:
        squares = (candidate.dequantize().astype(np.float64) - weight) ** 2 * np.diag(gram)
        return np.asarray(squares.reshape(9, 4, 16).sum(-1))

    grids = integer_grids.clipped(weight, scheme)
    best = np.min([error(integer_grids.rounded(weight, g, scheme)) for g in grids], axis=0)
    assert np.allclose(error(quant), best, rtol=1e-5)
    assert (error(quant) < error(quantized(weight, scheme)) * 0.9).any()
