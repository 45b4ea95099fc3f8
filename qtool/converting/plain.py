"""A quantized matrix as plain numbers."""

import numpy as np
from numpy.typing import NDArray

from qtool.converting.certificate import Squares
from qtool.converting.model import Quantized, Tensor
from qtool.converting.pieces import dequantize, spans
from qtool.errors import FormatError
from qtool.formats.safetensors_file import byte_size, from_float32, to_float32


def plain(tensor: Tensor, value: Quantized, dtype: str, sums: Squares) -> NDArray[np.uint8]:
    """The bytes in a dtype; `sums` gets what that loses. FormatError for what is no number."""
    out = np.empty(byte_size(dtype, tensor.shape), np.uint8)
    width = len(out) // value.shape[0]
    for first, last in spans(value.shape):
        with np.errstate(invalid="ignore"):  # of infinite scales, told below
            values = dequantize(value, slice(first, last))
        if not np.isfinite(values).all():
            raise FormatError(
                f"{tensor.name}: holds numbers that are not finite; the artifact is damaged"
            )
        raw = from_float32(values, dtype, tensor.name)
        sums.add(values, to_float32(raw, dtype, values.shape))
        out[first * width : last * width] = raw
    return out
