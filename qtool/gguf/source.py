"""What is quantized into a GGUF file: a GGUF file already, or a checkpoint seen as one.

Both are a list of named tensors whose rows can be read from any thread, and metadata. Names, row
order and metadata are llama.cpp's, so that nothing after this point knows where a model came from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.errors import UnsupportedError
from qtool.formats.gguf_values import Value
from qtool.gguf.from_hf.cuts import Cut
from qtool.gguf.from_hf.row_maps import Factor
from qtool.gguf_types import BF16, F16, F32, BlockType
from qtool.native import floats

QUANTIZATION_VERSION = 2  # of ggml's block types, GGML_QNT_VERSION

ReadRows = Callable[[int, int], NDArray[np.uint8]]
OrderOfRows = Callable[[NDArray[np.int64]], NDArray[np.int64]]
FillRows = Callable[[int, int, NDArray[np.uint8]], NDArray[np.uint8]]


@dataclass(frozen=True)
class SourceTensor:
    """One tensor as the source has it, under its GGUF name.

    shape: as numpy has it, [out, in], [experts, out, in] or [n]: the reverse of ggml's `ne`.
    read: rows first to last -> uint8 [last - first, bytes of a row], where the rows of all leading
    axes are counted through; it may be called from several threads at once.
    fill: the same into an array of the caller, where the source can do that.
    order: row numbers here -> those in the tensors of `origin`, laid one after another; None where
    they are the same. columns: which column of those each one is, None where it is the same.
    growth: what rows are multiplied by, None where it is nothing.
    stored: the type that the file has, where read() gives another.
    """

    name: str  # blk.0.attn_q.weight
    shape: tuple[int, ...]
    type: BlockType  # F32, F16, BF16, or a quantized type of a GGUF source
    read: ReadRows
    origin: tuple[str, ...] = ()  # the checkpoint tensors that it is made of
    fill: FillRows | None = None
    order: OrderOfRows | None = None
    columns: NDArray[np.int64] | None = None
    cut: Cut | None = None
    growth: Factor | None = None
    stored: BlockType | None = None

    @property
    def type_in_file(self) -> BlockType:
        """The type that the file has."""
        return self.stored or self.type

    @property
    def in_features(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.type.row_bytes(self.in_features)


@dataclass(frozen=True)
class GgufSource:
    """A model to write as GGUF; `dropped` are source tensors with the reason why they are not."""

    path: Path
    metadata: Mapping[str, Value]  # in the order of writing, without general.file_type
    tensors: tuple[SourceTensor, ...]  # in the source's order
    dropped: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None  # gives files back; no row is read afterwards
    requantized: str | None = None  # how a checkpoint is stored that is shown dequantized

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"].value)


def as_floats(
    tensor: SourceTensor, raw: NDArray[np.uint8], threads: int | None = None
) -> NDArray[np.float32]:
    """Rows of a tensor, as read() gives them, as float32 [rows, in_features]."""
    shape = (len(raw), tensor.in_features)
    if tensor.type == F32:
        return raw.reshape(-1).view(np.float32).reshape(shape)
    if tensor.type == F16:
        return floats.from_float16(raw.reshape(-1).view(np.float16).reshape(shape))
    if tensor.type == BF16:
        return floats.from_bfloat16(raw.reshape(-1).view(np.uint16).reshape(shape))
    if tensor.type.weights == 1:
        raise UnsupportedError(f"{tensor.name} holds {tensor.type.name}, which are no weights")
    return native_gguf.dequantize(raw, tensor.type, tensor.in_features, threads=threads)
