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

from qtool.checkpoints.checkpoint import View, Watch
from qtool.converting import to_checkpoint
from qtool.converting.certificate import Squares
from qtool.converting.from_artifact import artifact_model
from qtool.converting.fused import fused_of
from qtool.converting.model import Quantized
from qtool.converting.pieces import dequantize
from qtool.converting.plain import plain
from qtool.converting.plan import Step, dense_plan, in_dtype
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.safetensors_file import TensorInfo, byte_size, from_float32

_KEPT_OPEN = 2  # matrices, as codes: the one that threads are ending, and the next


@dataclass(frozen=True)
class Plain(View):
    """See Checkpoint. What has codes lies nowhere as it is read: its `start` is 0."""

    made: Mapping[str, Step] = field(default_factory=dict, repr=False)  # what has codes
    lost: tuple[str, ...] = ()  # sentences on what is not in the view
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
        return self._shown(name, plain(step.tensor, step.tensor.read(), step.dtype, Squares()))

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis."""
        step = self.made.get(name)
        if step is None:
            return super().part(name, first, last)
        each = prod(step.tensor.shape[1:-1])  # of experts in one tensor: rows of one
        rows = slice(first * each, last * each)
        with np.errstate(invalid="ignore"):  # of infinite scales, told below
            values = dequantize(self._quantized(name, step), rows)
        if last == step.tensor.shape[0]:  # parts are asked for in their order, or nearly
            self._close(name)
        if not np.isfinite(values).all():
            raise FormatError(f"{name}: holds numbers that are not finite; the artifact is damaged")
        return self._shown(name, from_float32(values, step.dtype, name))

    def stretch(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of a tensor from `start` to `stop`."""
        if name not in self.made:
            return super().stretch(name, start, stop)
        return self._stretch_of_part(name, start, stop)

    def _shown(self, name: str, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self.watch is not None:
            self.watch.made(name, raw)
        return raw

    def _quantized(self, name: str, step: Step) -> Quantized:
        with self._lock:
            if name not in self._open:
                assert step.tensor.read is not None
                value = step.tensor.read()
                while len(self._open) >= _KEPT_OPEN:
                    self._open.pop(next(iter(self._open)))
                self._open[name] = value
            return self._open[name]

    def _close(self, name: str) -> None:
        with self._lock:
            self._open.pop(name, None)

    @property
    def remarks(self) -> tuple[str, ...]:
        """That it is quantized, and what of it is left out."""
        again = (
            f"the source is quantized already ({self.stored_as}): quantizing it again loses more "
            "than quantizing the original does, where there is one"
        )
        return again, *self.lost


def plain_view(path: Path, watch: Watch | None = None) -> Plain:
    """The view; QtoolError for what `convert --to hf` refuses, and UnsupportedError where that puts
    experts together that lie one by one. watch: is shown what is stored, and what is made of it."""
    # Not sound: to read all of it is for who makes a copy.
    model = artifact_model(path, None, sound=False, watch=watch)
    checkpoint = model.checkpoint
    assert checkpoint is not None
    to_checkpoint.check_floats(model)
    fused, unknown = fused_of(model)
    if fused:
        raise UnsupportedError(
            f"{path}: experts lie one by one, and the model's class has them in one tensor "
            f"({fused[0].name}); make a plain checkpoint first, with `qtool convert MODEL --to hf`"
        )
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
    said = model.warnings if unknown is None else (unknown, *model.warnings)
    return Plain(
        checkpoint.path, in_dtype(model, model.dtype).config, tensors, checkpoint.metadata,
        checkpoint.files, file_of, checkpoint.readable, checkpoint, made, said, watch=watch,
    )  # fmt: skip
