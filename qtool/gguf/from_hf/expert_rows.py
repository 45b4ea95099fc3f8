"""Experts that a checkpoint keeps in MXFP4, as llama.cpp's blocks: the same codes and scales; and
biases of experts.

    checkpoint  ..._blocks [experts, out, groups, 16]: two numbers to a byte, neighbours together
                ..._scales [experts, out, groups]: an exponent for each group of 32
    gguf        [experts, out, groups * 17]: the exponent, then 16 bytes, number k with k + 16

Where a tensor interleaves the rows of two matrices, `share` is 2 and `half` tells which are taken.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError
from qtool.formats import safetensors_file as st
from qtool.formats.safetensors_header import TensorInfo
from qtool.gguf.from_hf.cuts import Stretch
from qtool.gguf.from_hf.row_maps import RowMap
from qtool.gguf_types import BY_NAME

MXFP4 = BY_NAME["MXFP4"]
BLOCKS, SCALES = "_blocks", "_scales"
_CODES = 16  # bytes of a group

Part = tuple[Stretch, TensorInfo]


@dataclass(frozen=True)
class PackedRows:
    """Rows of one of the matrices in a tensor of blocks and one of scales."""

    blocks: Stretch
    scales: Stretch
    shape: tuple[int, int, int]  # of the GGUF tensor, in numbers
    half: int = 0
    share: int = 1

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """GGUF rows first to last -> uint8 [last - first, bytes of a row]."""
        groups = self.shape[2] // MXFP4.weights
        codes = self._rows(self.blocks, first, last, groups * _CODES).reshape(-1, groups, _CODES)
        exponents = self._rows(self.scales, first, last, groups)
        numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, groups, MXFP4.weights)
        pairs = numbers[..., :_CODES] | numbers[..., _CODES:] << 4
        found = np.concatenate([exponents[..., None], pairs], axis=-1)
        return found.reshape(last - first, -1)

    def _rows(self, stretch: Stretch, first: int, last: int, width: int) -> NDArray[np.uint8]:
        step = self.share * width
        return stretch(first * step, last * step).reshape(-1, self.share, width)[:, self.half]


@dataclass(frozen=True)
class Biases:
    """One of the biases in a tensor [experts, rows], in float32."""

    stretch: Stretch
    info: TensorInfo
    half: int = 0
    share: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Of the GGUF tensor."""
        return self.info.shape[0], self.info.shape[1] // self.share

    def read(self, first: int, last: int) -> NDArray[np.uint8]:
        """The biases of experts first to last -> uint8 [last - first, bytes of a row]."""
        row = self.info.nbytes // self.info.shape[0]
        shape = (last - first, self.info.shape[1])
        values = st.to_float32(self.stretch(first * row, last * row), self.info.dtype, shape)
        return np.ascontiguousarray(values[:, self.half :: self.share]).view(np.uint8)


def biases(part: Part, rows: RowMap | None) -> Biases:
    """FormatError where it is no tensor of biases."""
    stretch, info = part
    half, share = _half(rows)
    fits = len(info.shape) == 2 and 0 not in info.shape and info.shape[1] % share == 0
    if not fits or info.dtype not in st.FLOAT_DTYPES:
        raise FormatError(
            f"{info.name} is {info.dtype} {list(info.shape)}, expected floats [experts, rows]"
        )
    return Biases(stretch, info, half, share)


def _half(rows: RowMap | None) -> tuple[int, int]:
    """Which of how many matrices has a tensor's first row."""
    if rows is None:
        return 0, 1
    return int(rows.forward(np.zeros(1, np.int64), 1, 1)[0]), rows.share


def packed_rows(blocks: Part, scales: Part, rows_of: RowMap | None) -> PackedRows:
    """FormatError where the two tensors do not belong together."""
    half, share = _half(rows_of)
    (read_blocks, one), (read_scales, other) = blocks, scales
    fits = len(one.shape) == 4 and one.shape[3] == _CODES and one.shape[:3] == other.shape
    if not fits or one.dtype != "U8" or other.dtype != "U8" or 0 in one.shape:
        raise FormatError(
            f"{one.name} is {one.dtype} {list(one.shape)} and {other.name} {other.dtype} "
            f"{list(other.shape)}; expected U8 [experts, rows, groups, {_CODES}], and one scale "
            "for each group"
        )
    experts, rows, groups, _ = one.shape
    if rows % share:
        raise FormatError(
            f"{one.name} has {rows} rows to an expert, which {share} matrices cannot share"
        )
    shape = (experts, rows // share, groups * MXFP4.weights)
    return PackedRows(read_blocks, read_scales, shape, half, share)
