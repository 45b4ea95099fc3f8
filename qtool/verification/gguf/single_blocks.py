"""Single blocks of a GGUF file whose scale is not the one that their codes were made with.

As in `off_scales`: all weights of such a block are off by one factor, and without it they are where
rounding leaves them,

    times = sum q q / sum q w       off: of w - q       left: of w * times - q

sums over the weights w of a block, stored as q, but for the largest and the smallest, which may be
at the ends of the range. Types with a minimum have blocks of 32 here, whose mean is taken out
first. Of 3 bits in a lattice and fewer, nothing is told.

Where importance counts, one weight may have most of it: the scale is then such that its code, of 1
step for 0.5 to 1.5 of them, is exact, and all others are off by that factor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from qtool.gguf_types import BY_NAME
from qtool.messages.sentences import AGAIN
from qtool.messages.sentences import count as counted
from qtool.verification.against.off_scales import LEAST, MANY, NEAR, OFF, worth
from qtool.verification.against.side_by_side import Floats, square_of, sums_of_products
from qtool.verification.against.single_scales import as_words, worst
from qtool.verification.finding import Finding

# Relative errors of normal numbers up to which a type tells; see typical.py.
COARSEST = 0.16
_WITH_MINIMUM, _WIDTH = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}, 32
_NEAR = NEAR, 1 / NEAR  # what is no factor
_NEAR_BY_IMPORTANCE = 0.45, 1.6
_LEFT = 3.0  # times the typical error: GPTQ makes 2 of it


@dataclass(frozen=True)
class Placed:
    """Weights of a row that stand beside each other."""

    row: int
    columns: range

    @property
    def place(self) -> str:
        """`row 5, columns 256 to 511`"""
        return f"row {self.row}, columns {self.columns[0]} to {self.columns[-1]}"

    def below(self, first: int) -> Self:
        """As many rows further down."""
        return replace(self, row=self.row + first)


@dataclass(frozen=True)
class OffBlock(Placed):
    """Weights that are so many times as large as their codes need."""

    times: float
    lost: float  # squared, of the differences from the source


def off_blocks(
    new: Floats, old: Floats, kind: str, typical: float, by_importance: bool = False
) -> list[OffBlock]:
    """Those of some rows [rows, in], as they are stored (new) and in the source (old).

    typical: the relative error that the type makes. by_importance: whether some weights counted
    more than others.
    """
    if not 0 < typical < COARSEST or kind not in BY_NAME:
        return []
    centred = kind in _WITH_MINIMUM
    width = _WIDTH if centred else BY_NAME[kind].weights
    pairs = ((old, old), (old, new), (new, new))
    ww, wq, qq = (sums_of_products(one, other, (width,))[0] for one, other in pairs)
    least = LEAST * ww.mean()
    if centred:
        w, q = (sums_of_products(one, None, (width,))[0] for one in (old, new))
        ww, wq, qq = ww - w * w / width, wq - w * q / width, qq - q * q / width
    gain = wq / np.maximum(ww, max(least, 1e-30))
    near = _NEAR_BY_IMPORTANCE if by_importance else _NEAR
    odd = (ww > least) & ~((gain > near[0]) & (gain < near[1]))
    odd &= ww - 2 * wq + qq > OFF * (qq - gain * wq)
    if not odd.any() or odd.sum() > max(1, MANY * odd.size):
        return []
    found: list[OffBlock] = []
    for row, number in zip(*np.nonzero(odd), strict=True):
        columns = range(int(number) * width, min((int(number) + 1) * width, old.shape[1]))
        part = slice(columns.start, columns.stop)
        times = _times(new[row, part], old[row, part], centred, (_LEFT * typical) ** 2)
        if times is not None and not near[0] < times < near[1]:
            lost = square_of(new[row, part] - old[row, part])
            found.append(OffBlock(int(row), columns, times, lost))
    return _joined(found, BY_NAME[kind].weights)


def _joined(found: Sequence[OffBlock], width: int) -> list[OffBlock]:
    """Parts of one block of so many weights that are as large are that block."""
    joined: list[OffBlock] = []
    for one in found:
        last = joined[-1] if joined else one
        first = one.columns[0] // width * width
        same = last is not one and (last.row, last.columns[0] // width * width) == (one.row, first)
        if same and _NEAR[0] < one.times / last.times < _NEAR[1]:
            columns, lost = range(first, first + width), last.lost + one.lost
            joined[-1] = replace(last, columns=columns, lost=lost)
        else:
            joined.append(one)
    return joined


def _times(new: Floats, old: Floats, centred: bool, most: float) -> float | None:
    """How many times as large a block is as its codes need; None where that is not sure. most: the
    mean square that may be left, of the source's."""
    inner = (new > new.min()) & (new < new.max())
    if inner.sum() < 8:
        return None
    q, w = new[inner].astype(np.float64), old[inner].astype(np.float64)
    if centred:
        q, w = q - q.mean(), w - w.mean()
    if not (shared := float(q @ w)):
        return None
    times = float(q @ q) / shared
    off, left = float(np.square(w - q).mean()), float(np.square(w * times - q).mean())
    sure = off > float(worth(q.size)) * left
    explained = left <= most * times * times * float(np.square(w).mean())
    return times if sure and explained else None


def told(check: str, found: Mapping[str, Sequence[OffBlock]]) -> Iterator[Finding]:
    """One error, the worst first. found: by tensor."""
    if not found:
        return
    every = [(name, one) for name, several in found.items() for one in several]
    words = as_words([(one.times, f"{name}, {one.place}") for name, one in every])
    yield Finding(
        "error", check, worst([(one.times, name) for name, one in every]),
        f"{counted(len(every), 'block')} of {counted(len(found), 'tensor')} "
        f"{'has a scale' if len(every) == 1 else 'have scales'} unlike the source's: {words}; "
        f"{AGAIN}",
    )  # fmt: skip
