"""Parts of the matrices in a checkpoint's tensor, one below the other, as a tensor of their own.

    kv_b_proj [heads * (keys + values), latent] -> keys [heads, latent, keys]: transposed
                                                -> values [heads, values, latent]
    gate_up_proj [experts, hidden, 2 * inner]   -> [experts, 2 * inner, hidden]: transposed

What is transposed is read in bands of a matrix, of which a few are kept: pieces of a tensor are
encoded one after another, and each would read all of the matrix otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from qtool.errors import OTHER_MODEL, FormatError
from qtool.formats.safetensors_header import TensorInfo

Stretch = Callable[[int, int], NDArray[np.uint8]]  # the bytes of a tensor, from one to another
_BAND_BYTES = 1 << 24
_READ_BYTES = 1 << 22
_BANDS = 4


@dataclass(frozen=True)
class Cut:
    """Rows first to last of each of several matrices, transposed or not.

    matrices: how many there are, 0 where the tensor has an axis of them. height: the rows of each,
    0 where nothing but the tensor tells.
    """

    matrices: int = 0
    height: int = 0
    first: int = 0
    last: int = 0  # 0: to the end
    transposed: bool = False

    @property
    def only_transposed(self) -> bool:
        """Whether each matrix is all of a stored one, transposed."""
        return self.transposed and not (self.matrices or self.first or self.last)


def cut_out(stretch: Stretch, info: TensorInfo, cut: Cut) -> tuple[Stretch, TensorInfo]:
    """The part as a tensor [matrices, rows, columns]; FormatError where there is no such part."""
    if cut.matrices:
        fits = len(info.shape) == 2 and info.shape[0] == cut.matrices * cut.height
        expected = f"{cut.matrices * cut.height} rows"
    else:
        fits = len(info.shape) == 3 and (not cut.height or info.shape[1] == cut.height)
        expected = "an axis of matrices"
    if not fits or 0 in info.shape:
        raise FormatError(
            f"{info.name} has the shape {list(info.shape)}, and by the settings of config.json it "
            f"should have {expected}; {OTHER_MODEL}"
        )
    matrices = cut.matrices or info.shape[0]
    stored = (matrices, prod(info.shape[:-1]) // matrices, info.shape[-1])
    rows = (cut.last or stored[1]) - cut.first
    shape = (matrices, stored[2], rows) if cut.transposed else (matrices, rows, stored[2])
    item = info.nbytes // prod(info.shape)
    parts = _Parts(stretch, stored, cut.first, rows, item, shape)
    found = TensorInfo(info.name, info.dtype, shape, 0, item * prod(shape))
    return (parts.transposed if cut.transposed else parts.straight), found


@dataclass(frozen=True, eq=False)
class _Parts:
    stretch: Stretch
    stored: tuple[int, int, int]
    first: int
    rows: int  # of each matrix, from `first` on
    item: int  # bytes of a number
    shape: tuple[int, int, int]

    def straight(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of the part, from one to another."""
        each = self.rows * self.stored[2] * self.item
        found = [self._run(m, a, b) for m, a, b in _ranges(start, stop, each)]
        return np.concatenate(found) if found else np.empty(0, np.uint8)

    def transposed(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The same of what is transposed."""
        step = self._columns * self.rows * self.item
        found = []
        for matrix, a, b in _ranges(start, stop, self.stored[2] * self.rows * self.item):
            for band, first, last in _ranges(a, b, step):
                with _LOCK:
                    found.append(_band(self, matrix, band)[first:last])
        return np.concatenate(found) if found else np.empty(0, np.uint8)

    @property
    def _columns(self) -> int:
        """How many columns of a matrix make a band."""
        return max(1, _BAND_BYTES // (self.rows * self.item))

    def band(self, matrix: int, number: int) -> NDArray[np.uint8]:
        """Some columns of a matrix, one after another."""
        width = self.stored[2]
        begin = number * self._columns
        end = min(width, begin + self._columns)
        found = np.empty((end - begin, self.rows, self.item), np.uint8)
        row = width * self.item
        step = max(1, _READ_BYTES // row)
        for first in range(0, self.rows, step):
            last = min(self.rows, first + step)
            some = self._run(matrix, first * row, last * row).reshape(-1, width, self.item)
            found[:, first:last] = some[:, begin:end].swapaxes(0, 1)
        return found.reshape(-1)

    def _run(self, matrix: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes of the rows of one matrix as they are stored."""
        row = self.stored[2] * self.item
        base = (matrix * self.stored[1] + self.first) * row
        return self.stretch(base + start, base + stop)


_LOCK = Lock()


@lru_cache(maxsize=_BANDS)
def _band(parts: _Parts, matrix: int, number: int) -> NDArray[np.uint8]:
    return parts.band(matrix, number)


def _ranges(start: int, stop: int, each: int) -> list[tuple[int, int, int]]:
    """Which of several equal parts, and from where to where in it."""
    numbers = range(start // each, -(-stop // each)) if stop > start else range(0)
    return [(n, max(start - n * each, 0), min(stop - n * each, each)) for n in numbers]
