"""Experts of gpt-oss as they are released: MXFP4 in two tensors of bytes for each that a plain
checkpoint has.

    NAME_blocks  uint8 [experts, out, groups, 16]   two e2m1 numbers to a byte, the first in the
                                                    low nibble
    NAME_scales  uint8 [experts, out, groups]       e8m0, of 32 numbers
    NAME         float [experts, groups * 32, out]  as a plain checkpoint has it: transposed

Source: transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qtool.errors import FormatError
from qtool.formats.dtypes import FLOAT_DTYPES
from qtool.formats.safetensors_header import TensorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

BLOCKS, SCALES = "_blocks", "_scales"
SCHEME = "mxfp4 g32 stack"
NAN = 255  # the byte of a scale that is no number
GROUP = 32


def stack_of(name: str, tensors: Mapping[str, TensorInfo]) -> tuple[str, tuple[int, ...]] | None:
    """The plain tensor that blocks of this name stand for, and its shape; None for anything else.

    FormatError where the scales beside them are of other groups.
    """
    stem = name.removesuffix(BLOCKS)
    scales = tensors.get(stem + SCALES)
    if stem == name or scales is None or ".experts." not in name:
        return None
    blocks = tensors[name]
    fits = len(blocks.shape) == 4 and blocks.shape[3] * 2 == GROUP and 0 not in blocks.shape
    if not fits or blocks.shape[:3] != scales.shape or {blocks.dtype, scales.dtype} != {"U8"}:
        raise FormatError(
            f"{name} is {blocks.dtype} {list(blocks.shape)} and {scales.name} {scales.dtype} "
            f"{list(scales.shape)}; expected U8 [experts, rows, groups, {GROUP // 2}], and one "
            "scale for each group"
        )
    experts, rows, groups, _ = blocks.shape
    return stem, (experts, groups * GROUP, rows)


def misnamed(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Plain numbers under the names of blocks, and the names that they should have: transformers
    5.23 saves so what it has dequantized."""
    return {
        name: name.removesuffix(BLOCKS)
        for name, info in tensors.items()
        if name.endswith(BLOCKS)
        and ".experts." in name
        and info.dtype in FLOAT_DTYPES
        and name.removesuffix(BLOCKS) not in tensors
    }


def dequantize(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[experts, out, groups, 16] and [experts, out, groups] -> [experts, groups * 32, out]."""
    from qtool.float_codes import E8M0, TABLES

    numbers = TABLES["e2m1"][np.stack([blocks & 15, blocks >> 4], axis=-1)]
    experts, rows, groups = scales.shape
    values = numbers.reshape(experts, rows, groups, GROUP) * E8M0[scales][..., None]
    transposed = values.reshape(experts, rows, groups * GROUP).transpose(0, 2, 1)
    return np.ascontiguousarray(transposed)
