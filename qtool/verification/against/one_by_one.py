"""A source whose experts lie in one tensor, gate and up interleaved (gpt-oss), seen with a matrix
an expert: where it is no plain checkpoint, of which qtool.checkpoints.fused_experts makes a
view."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.fused_experts import matrices
from qtool.formats.safetensors_file import TensorInfo, to_float32
from qtool.streaming.weights import Weights


@dataclass(frozen=True)
class OneByOne:
    """See qtool.streaming.weights.Weights: fused experts in float32, one by one; all else as it
    is."""

    whole: Weights
    tensors: Mapping[str, TensorInfo]
    stack_of: Mapping[str, tuple[str, int]]  # of a matrix: the tensor, and the expert

    @property
    def path(self) -> Path:
        """What messages name."""
        return self.whole.path

    @property
    def folder(self) -> Path:
        """Where config.json and the tokenizer lie."""
        return self.whole.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self.whole.config

    def file_of(self, name: str) -> Path:
        """The file that a tensor comes from, for messages."""
        return self.whole.file_of(self.stack_of.get(name, (name, 0))[0])

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis, in its dtype."""
        if name not in self.stack_of:
            return self.whole.part(name, first, last)
        return np.ascontiguousarray(self.float32(name)[first:last]).reshape(-1).view(np.uint8)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor in its numpy dtype; BF16 as uint16."""
        return self.float32(name) if name in self.stack_of else self.whole.array(name)

    def float32(self, name: str) -> NDArray[np.float32]:
        """A float tensor as float32, of its own shape."""
        if name not in self.stack_of:
            return self.whole.float32(name)
        stack, expert = self.stack_of[name]
        info = self.whole.tensors[stack]
        raw = self.whole.part(stack, expert, expert + 1)
        return np.ascontiguousarray(to_float32(raw, info.dtype, info.shape[1:]).T)


def one_by_one(source: Weights) -> Weights:
    """The view; the source itself where it has no such experts."""
    stacks = matrices(source.tensors, interleaved=True)
    if not stacks:
        return source
    tensors: dict[str, TensorInfo] = {}
    stack_of: dict[str, tuple[str, int]] = {}
    for name, info in source.tensors.items():
        if name not in stacks:
            tensors[name] = info
            continue
        rows, columns = info.shape[2], info.shape[1]
        for expert, matrix in enumerate(stacks[name]):
            tensors[matrix] = TensorInfo(matrix, "F32", (rows, columns), 0, 4 * rows * columns)
            stack_of[matrix] = name, expert
    return OneByOne(source, tensors, stack_of)
