"""What a forward pass reads a model from: a checkpoint, or something that can be seen as one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.dtypes import check_floats, to_float32
from qtool.formats.safetensors_header import TensorInfo
from qtool.native.floats import from_bfloat16, from_float16

Rows = Callable[[int, int], NDArray[np.float32]]  # of a matrix, from the first row to the last


class Weights(Protocol):
    """Tensors under the names that checkpoints have, with config.json and a tokenizer.

    Checkpoint is one; GgufWeights shows a GGUF file in this way, dequantized as it is read.
    """

    @property
    def path(self) -> Path:
        """What messages name."""

    @property
    def folder(self) -> Path:
        """Where config.json and the tokenizer lie."""

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Names with dtype and shape."""

    def file_of(self, name: str) -> Path:
        """The file that a tensor comes from, for messages."""

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis, in its dtype."""

    def array(self, name: str) -> NDArray[Any]:
        """A tensor in its numpy dtype; BF16 as uint16."""

    def float32(self, name: str) -> NDArray[np.float32]:
        """A float tensor as float32, of its own shape."""


def is_view(source: Weights) -> bool:
    """Whether it makes what is read of it, and may have to make more of it than is asked for."""
    return type(source) is not Checkpoint


def rows_of(source: Weights, name: str, in_parts: bool = False) -> Rows:
    """The rows of a float matrix as float32. Of a view the whole is kept in its own dtype, but for
    what is too large for that: in_parts."""
    info = source.tensors[name]
    check_floats(info.dtype, name)
    whole = source.array(name) if is_view(source) and not in_parts else None

    def rows(first: int, last: int) -> NDArray[np.float32]:
        if whole is None:
            raw = source.part(name, first, last)
        else:
            raw = np.ascontiguousarray(whole[first:last]).reshape(-1).view(np.uint8)
        shape = (last - first, *info.shape[1:])
        if info.dtype == "BF16":
            return from_bfloat16(raw.view(np.uint16).reshape(shape), threads=1)
        if info.dtype == "F16":
            return from_float16(raw.view(np.float16).reshape(shape), threads=1)
        return to_float32(raw, info.dtype, shape)

    return rows
