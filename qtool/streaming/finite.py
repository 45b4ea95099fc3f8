"""What is said of a weight that is no finite number, or none in float32.

Everything is computed in float32. Of what is stored in float64 a number may be beyond that: it is
read as an infinity, and the file is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qtool.errors import SourceError
from qtool.formats.safetensors_header import TensorInfo

if TYPE_CHECKING:
    from qtool.streaming.weights import Weights

Stretch = Callable[[int, int], NDArray[np.uint8]]  # bytes of a tensor, from one to another
_AT_ONCE = 1 << 24  # bytes


class NotFiniteError(SourceError):
    """Of the file alone: no other settings help."""


def not_finite(source: Weights, name: str, index: Sequence[int], value: float) -> NotFiniteError:
    """Of a tensor that was read as float32, with `value` at `index`."""
    from qtool.checkpoints.checkpoint import Checkpoint, View

    stored = source
    while isinstance(stored, View):
        stored = stored.original
    where = f"{source.file_of(name)}: "
    if isinstance(stored, Checkpoint) and name in stored.tensors and np.isinf(value):
        info = stored.tensors[name]
        found = beyond(info, lambda start, stop: stored.stretch(name, start, stop), where)
        if found is not None:
            return found
    return NotFiniteError(
        f"{where}tensor {name!r} holds {value} at {[*index]}; weights must be finite, so the file "
        "is damaged or was saved wrongly"
    )


def beyond(info: TensorInfo, stretch: Stretch, where: str = "") -> NotFiniteError | None:
    """Of the first number of a tensor that float32 has not; None where there is none."""
    if info.dtype != "F64":
        return None
    size = 8 * prod(info.shape)
    for start in range(0, size, _AT_ONCE):
        values = stretch(start, min(size, start + _AT_ONCE)).view("<f8")
        with np.errstate(over="ignore"):
            hit = np.isinf(values.astype(np.float32)) & np.isfinite(values)
        if hit.any():
            first = int(np.argmax(hit))
            index = [int(i) for i in np.unravel_index(start // 8 + first, info.shape)]
            return NotFiniteError(
                f"{where}tensor {info.name!r} holds {values[first]} at {index}, which is beyond "
                "float32 (3.4e+38 at most), in which everything is computed; take the model as it "
                "was saved in float32 or less, or mend that number"
            )
    return None
