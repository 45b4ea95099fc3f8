"""A quantized checkpoint seen as the plain one that `qtool convert --to hf` makes of it.

Matrices are dequantized as they are read, so that a release in FP8 is quantized again without a
copy in bfloat16, which would be twice as large. Every byte is the one that the copy would have.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting.certificate import Squares
from qtool.converting.from_artifact import artifact_model
from qtool.converting.model import Quantized
from qtool.converting.pieces import dequantize
from qtool.converting.plain import plain
from qtool.converting.plan import Step, dense_plan
from qtool.errors import FormatError
from qtool.formats.safetensors_file import TensorInfo, byte_size, from_float32

_MOST_BYTES = 1 << 28  # of codes that are kept, as threads read a matrix in parts
_FEWEST = 2  # matrices that are, however large: the one that ends, and the next


@dataclass(frozen=True)
class Plain(Checkpoint):
    """See Checkpoint. What has codes lies nowhere as it is read: its `start` is 0."""

    source: Checkpoint | None = field(default=None, repr=False)  # as it lies there
    made: Mapping[str, Step] = field(default_factory=dict, repr=False)  # what has codes
    _open: dict[str, Quantized] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def stored_as(self) -> str:
        """How its matrices are stored, in words."""
        found = Counter(step.tensor.stored for step in self.made.values())
        return ", ".join(kind for kind, _ in found.most_common())

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [nbytes]."""
        step = self.made.get(name)
        if step is None:
            return super().raw(name)
        assert step.tensor.read is not None
        return plain(step.tensor, step.tensor.read(), step.dtype, Squares())

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis."""
        step = self.made.get(name)
        if step is None:
            return super().part(name, first, last)
        each = prod(step.tensor.shape[1:-1])  # of experts in one tensor: rows of one
        rows = slice(first * each, last * each)
        with np.errstate(invalid="ignore"):  # of infinite scales, told below
            values = dequantize(self._quantized(name, step), rows)
        if not np.isfinite(values).all():
            raise FormatError(f"{name}: holds numbers that are not finite; the artifact is damaged")
        return from_float32(values, step.dtype, name)

    def stretch(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of a tensor from `start` to `stop`."""
        if name not in self.made:
            return super().stretch(name, start, stop)
        return self._stretch_of_part(name, start, stop)

    def _quantized(self, name: str, step: Step) -> Quantized:
        with self._lock:
            if name not in self._open:
                assert step.tensor.read is not None
                value = step.tensor.read()
                self._open[name] = value
                while len(self._open) > _FEWEST and self._bytes_open() > _MOST_BYTES:
                    self._open.pop(next(iter(self._open)))
            return self._open[name]

    def _bytes_open(self) -> int:
        return sum(prod(value.shape) for value in self._open.values())

    @property
    def file_digests(self) -> Mapping[str, str]:
        """Those of the files as they lie there."""
        assert self.source is not None
        return self.source.file_digests


def plain_view(path: Path) -> Plain:
    """The view; QtoolError for what `convert --to hf` refuses."""
    model = artifact_model(path, None)
    checkpoint = model.checkpoint
    assert checkpoint is not None
    steps = {step.tensor.name: step for step in dense_plan(model.tensors, model.dtype).steps}
    tensors: dict[str, TensorInfo] = {}
    for name, step in steps.items():
        if step.tensor.read is None:
            tensors[name] = checkpoint.tensors[name]
        else:
            size = byte_size(step.dtype, step.tensor.shape)
            tensors[name] = TensorInfo(name, step.dtype, step.tensor.shape, 0, size)
    made = {name: step for name, step in steps.items() if step.tensor.read is not None}
    codes: dict[str, Path] = {}  # where a matrix has no tensor of its own name
    for name in checkpoint.tensors:
        codes.setdefault(f"{name.rpartition('.')[0]}.weight", checkpoint.file_of(name))
    file_of = {
        name: checkpoint.file_of(name) if name in checkpoint.tensors else codes[name]
        for name in tensors
    }
    return Plain(
        checkpoint.path, model.config, tensors, checkpoint.metadata, checkpoint.files, file_of,
        checkpoint.readable, checkpoint, made,
    )  # fmt: skip
