"""What a forward pass reads a model from: a checkpoint, or something that can be seen as one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.formats.safetensors_header import TensorInfo


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
