"""Orthogonal matrices R that rotate vectors, x -> x R, and how one is chosen.

    hadamard    R = D H / sqrt(n): D random signs, H a Hadamard matrix, for sizes that have one
    random      R of the QR decomposition of a matrix of normal numbers
    learned     a matrix that was found on calibration data (`qtool.transforms.learned`)

One that has to leave the all-ones vector as it is (a LayerNorm takes the mean out, which is a
product with it) is followed by the reflection that brings it back: with u = 1 / sqrt(n) and
v = u R, the product R (I - 2 w w'), w = (v - u) / |v - u|.

Products are computed in float64, column by column the same for any number of columns.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.transforms import hadamard
from qtool.transforms.hadamard import Reals

_TOGETHER = 64  # columns of a product with a whole matrix: BLAS sums depend on how many there are


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix, with which row vectors are multiplied from the right."""

    size: int
    kind: str  # hadamard, random or learned
    signs: Reals | None = None  # [n], of hadamard
    matrix: Reals | None = None  # [n, n], of the others
    reflected: Reals | None = None  # [n], the w of the reflection that follows

    def apply(self, columns: Reals) -> Reals:
        """R' X of X [n, N]: each column is a vector x, and becomes x R."""
        found = self._plain(columns)
        if self.reflected is not None:
            found -= 2 * self.reflected[:, None] * _sum(self.reflected[:, None] * found)
        return found

    def _plain(self, columns: Reals) -> Reals:
        if self.matrix is None:
            assert self.signs is not None
            odd = hadamard.odd_factor(self.size)
            assert odd is not None
            return hadamard.multiply(self.signs[:, None] * columns, odd)
        return _product(self.matrix, columns)

    def dense(self) -> Reals:
        """R itself, [n, n]."""
        return np.ascontiguousarray(self.apply(np.eye(self.size)).T)

    def describe(self) -> str:
        """For people and provenance: hadamard 576 = 36 x 16."""
        odd = hadamard.odd_factor(self.size) if self.kind == "hadamard" else None
        if odd is None:
            return f"{self.kind} {self.size}"
        return f"hadamard {self.size}" + (
            f" = {odd} x {self.size // odd}" if 1 < odd < self.size else ""
        )


def _sum(terms: Reals) -> Reals:
    """The sum of the rows, number by number; numpy's own adds a lone column in another order."""
    rows = terms.shape[0]
    while rows > 1:
        half = (rows + 1) // 2
        terms[: rows - half] += terms[half:rows]
        rows = half
    return terms[:1]


def _product(matrix: Reals, columns: Reals) -> Reals:
    """R' X on one thread, always the same number of columns at a time."""
    import torch

    from qtool.streaming.single_thread import single_thread

    size, count = columns.shape
    found = np.empty_like(columns)
    transposed = torch.from_numpy(np.ascontiguousarray(matrix.T))
    with single_thread():
        for start in range(0, count, _TOGETHER):
            part = np.zeros((size, _TOGETHER))
            stop = min(start + _TOGETHER, count)
            part[:, : stop - start] = columns[:, start:stop]
            product = (transposed @ torch.from_numpy(part)).numpy()
            found[:, start:stop] = product[:, : stop - start]
    return found


def make(kind: str, size: int, seed: tuple[int, ...]) -> Rotation:
    """The rotation of a seed. Where a size has no Hadamard matrix, a random orthogonal one."""
    rng = np.random.default_rng(seed)
    if kind == "hadamard" and hadamard.odd_factor(size) is not None:
        return Rotation(size, "hadamard", signs=rng.choice(np.array([-1.0, 1.0]), size))
    return Rotation(size, "random", matrix=_random(size, rng))


def sylvester(size: int) -> Rotation:
    """Sylvester's matrix over sqrt(size), a power of two: the one that engines know."""
    return Rotation(size, "hadamard", signs=np.ones(size))


def learned(matrix: Reals) -> Rotation:
    """A rotation by an orthogonal matrix [n, n]."""
    return Rotation(matrix.shape[0], "learned", matrix=matrix)


def fixing_ones(rotation: Rotation) -> Rotation:
    """The rotation followed by the reflection that brings the all-ones vector back."""
    size = rotation.size
    unit = np.full((size, 1), 1 / np.sqrt(size))
    off = (rotation.apply(unit) - unit)[:, 0]
    length = float(np.sqrt((off * off).sum()))
    if length < 1e-12:
        return rotation
    return Rotation(size, rotation.kind, rotation.signs, rotation.matrix, off / length)


def _random(size: int, rng: np.random.Generator) -> Reals:
    import torch

    from qtool.streaming.single_thread import single_thread

    with single_thread():
        q, r = torch.linalg.qr(torch.from_numpy(rng.standard_normal((size, size))))
    # Evenly distributed only once the signs of the diagonal are taken out.
    found: NDArray[np.float64] = (q * torch.sign(torch.diagonal(r))).numpy()
    return np.ascontiguousarray(found)
