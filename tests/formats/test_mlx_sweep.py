"""GPTQ onto MLX's grids, offsets as they are stored: codes against an oracle in float64."""

import numpy as np
import pytest

from qtool.methods import gptq
from qtool.scheme import GroupQuant, Scheme
from support.methods.sweep_reference import problem


def reference(weight: np.ndarray, gram: np.ndarray, quant: GroupQuant, damp: float) -> np.ndarray:
    """GPTQ by its definition, largest diagonal first: round a column, solve for the rest."""
    order = np.argsort(-np.diagonal(gram), kind="stable")
    left = weight[:, order].astype(np.float64)
    hessian = gram[np.ix_(order, order)] / np.diagonal(gram).mean() + damp * np.eye(len(gram))
    groups = order // quant.scheme.group_size
    scale, offset = (one.astype(np.float64) for one in (quant.scale, quant.row_offset()))
    codes = np.empty(weight.shape, np.uint8)
    for step, column in enumerate(order):
        step_scale, step_offset = scale[:, groups[step]], offset[:, groups[step]]
        code = np.rint((left[:, step] - step_offset) / step_scale)
        codes[:, column] = np.clip(code, 0, (1 << quant.scheme.bits) - 1)
        error = left[:, step] - (codes[:, column] * step_scale + step_offset)
        inverse = np.linalg.inv(hessian[step:, step:])
        left[:, step:] -= np.outer(error / inverse[0, 0], inverse[0])
    return codes


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_codes_equal_the_oracle(bits: int) -> None:
    weight, gram = problem(bits, 48, 64)
    weight += np.float32(0.3)
    scheme = Scheme(bits, 32, False, "bfloat16", outer="offset")
    options = gptq.Options(token_damping=False)
    given = gptq.factor(gram, options, dtype=np.float64)
    quant = gptq.quantize_with(weight.astype(np.float64), given, scheme, options)
    assert np.array_equal(quant.codes, reference(weight, gram, quant, options.damp_percent))


def test_grids_are_those_of_whole_zeros_and_errors_smaller() -> None:
    """Of 8 bits a bias in bfloat16 is off by up to a quarter of a step."""
    weight, gram = problem(1, 48, 64)
    scheme, options = Scheme(8, 32, False, "bfloat16", outer="offset"), gptq.Options()
    given = gptq.factor(gram.astype(np.float32), options, 256)
    quant = gptq.quantize_with(weight, given, scheme, options)
    whole = Scheme(8, 32, False, "bfloat16")
    before = gptq.quantize_with(weight, given, whole, options)
    assert np.array_equal(quant.scale, before.scale) and np.array_equal(quant.zero, before.zero)

    def error(codes: np.ndarray) -> float:
        off = GroupQuant(scheme, codes, quant.scale, quant.zero).dequantize() - weight
        return float(np.einsum("ij,jk,ik->", off, gram, off))

    assert error(quant.codes) < 0.6 * error(before.codes)
    assert not gptq.rounds_offsets(Scheme(8, 32, True, "bfloat16", outer="offset"), options)
