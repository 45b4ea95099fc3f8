"""One matrix made ready for its new format, and how far it is from what it was."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qtool import methods
from qtool.converting.blocks import BlockMatrix
from qtool.converting.certificate import Squares
from qtool.converting.model import Quantized
from qtool.converting.obstacles import ANEW, ZEROS
from qtool.converting.pieces import dequantize, spans
from qtool.converting.plan import Step
from qtool.converting.survey import grouped, has_offsets, in_dtype, merged, with_whole_scale
from qtool.errors import FormatError, UnsupportedError
from qtool.methods import rtn
from qtool.scheme import GroupQuant


def fitted(step: Step, value: Quantized) -> GroupQuant:
    """The matrix under the step's scheme: the same numbers, unless the step is lossy."""
    assert step.scheme is not None
    if step.lossy == ANEW:
        values = finite(step.tensor.name, value.dequantize())
        with methods.named(step.tensor.name):
            made = rtn.quantize(values, None, step.scheme, rtn.Options()).quant
        return replace(
            made, scheme=step.scheme, scale=in_dtype(made.scale, step.scheme.scale_dtype)
        )
    if isinstance(value, GroupQuant) and value.scheme.is_float:
        if value.scheme == step.scheme:
            return value
        if with_whole_scale(value.scheme) == step.scheme:
            return replace(value, scheme=step.scheme, outer=1.0)
    quant = grouped(value)
    if quant is None and step.lossy == ZEROS:
        quant = value.nearest if isinstance(value, BlockMatrix) else nearest(value)
    assert quant is not None  # the survey saw to it
    if quant.scheme.group_size != step.scheme.group_size:
        quant = merged(quant, step.scheme.group_size)
    scale = in_dtype(quant.scale, step.scheme.scale_dtype)
    if not np.isfinite(scale).all():
        raise UnsupportedError(
            f"{step.tensor.name}: scales up to {float(np.abs(quant.scale).max()):.3g} are too "
            f"large for {step.scheme.scale_dtype}"
        )
    return replace(quant, scheme=step.scheme, scale=scale)


def nearest(value: Quantized) -> GroupQuant:
    """MLX's codes with whole zeros."""
    assert has_offsets(value)
    return value.with_nearest_zeros()


def finite(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values; FormatError where one of them is no number."""
    if not np.isfinite(values).all():
        raise FormatError(f"{name}: holds numbers that are not finite; the artifact is damaged")
    return values


def relative_error(one: Quantized, other: Quantized) -> float:
    """|one - other| / |one|."""
    sums = Squares()
    for span in spans(one.shape):
        sums.add(dequantize(one, slice(*span)), dequantize(other, slice(*span)))
    return sums.relative_error
