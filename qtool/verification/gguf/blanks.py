"""Blocks of a GGUF file with bytes that were lost, or never written.

A run of bytes of 0 is chance in no type: each stands for codes at an end of their range, or for
scales. Only where the source is about 0, or beside a weight that is far larger than all others of
its block, is it no damage, and then the block is near the source; or where the type itself has
nothing for weights so small.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool import native_gguf
from qtool.gguf_types import BY_NAME, BlockType
from qtool.messages.sentences import AGAIN, some, verb
from qtool.messages.sentences import count as counted
from qtool.verification.against.side_by_side import Floats
from qtool.verification.finding import Finding
from qtool.verification.gguf.single_blocks import OffBlock, Placed

_RUN = 16  # bytes
_WORD = 8  # bytes: a run has one that lies evenly
_MANY = 0.1  # of the blocks: zeros on purpose
# Relative error of a block: times the typical one, at the least and at the most.
_FAR, _LEAST, _MOST = 3.0, 0.3, 0.9
_WORSE = 1.5  # times what the type loses of a block
_SMALL = 0.05  # of the mean square: blocks that are about 0


@dataclass(frozen=True)
class Blank(Placed):
    """The weights of a block with lost bytes."""

    lost: float  # squared, of the differences from the source

    def has(self, other: OffBlock) -> bool:
        """Whether a block lies in this one."""
        return self.row == other.row and other.columns.start in self.columns


def blanks(
    raw: NDArray[np.uint8], new: Floats, old: Floats, kind: str, typical: float
) -> list[Blank]:
    """Those of some rows [rows, in], as they are stored (raw, new) and in the source (old).
    typical: the relative error that the type makes."""
    if kind not in BY_NAME:
        return []
    block, flat = BY_NAME[kind], raw.reshape(-1)
    hit = sorted({at for run in _runs(flat) for at in _blocks(run, block.nbytes)})
    if not hit or len(hit) > max(1, _MANY * flat.size // block.nbytes):
        return []
    wide = old.shape[1] // block.weights
    was, now = (m.reshape(-1, block.weights)[hit].astype(np.float64) for m in (old, new))
    whole, lost = np.square(was).sum(axis=1), np.square(was - now).sum(axis=1)
    least = _SMALL * block.weights * float(np.square(old, dtype=np.float64).mean())
    far = min(max(_FAR * typical, _LEAST), _MOST) ** 2
    found = []
    for at in np.flatnonzero((whole > least) & (lost > far * whole)):
        if lost[at] <= _WORSE * _lost_by_the_type(was[at], block):
            continue
        row, number = divmod(hit[at], wide)
        columns = range(number * block.weights, (number + 1) * block.weights)
        found.append(Blank(row, columns, float(lost[at])))
    return found


def _lost_by_the_type(was: NDArray[np.float64], block: BlockType) -> float:
    """Squared, of a block's weights: NVFP4 has no scales for those that are small beside a whole
    matrix."""
    if block.needs_importance:
        return 0.0
    weight = was.astype(np.float32)[None]
    kept = native_gguf.dequantize(native_gguf.encode(weight, block), block, block.weights)
    return float(np.square(was - kept[0]).sum())


def _runs(flat: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Where _RUN bytes and more are 0: first, and behind the last."""
    words = flat[: flat.size // _WORD * _WORD].view(np.uint64)
    if not (words == 0).any():
        return []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat == 0, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    long = ends - starts >= _RUN
    return [*zip(starts[long].tolist(), ends[long].tolist(), strict=True)]


def _blocks(run: tuple[int, int], nbytes: int) -> range:
    """The blocks of so many bytes that a run lies in."""
    return range(run[0] // nbytes, (run[1] - 1) // nbytes + 1)


def told(check: str, found: Mapping[str, Sequence[Blank]]) -> Iterator[Finding]:
    """One error, of the tensor with the most first. found: by tensor."""
    if not found:
        return
    names = sorted(found, key=lambda name: -len(found[name]))
    where = [f"{n} ({counted(len(found[n]), 'block')}, the first: {found[n][0].place})"
             for n in names]  # fmt: skip
    yield Finding(
        "error", check, names[0],
        f"{counted(len(names), 'tensor')} {verb(len(names), 'have', 'has')} blocks with bytes of 0 "
        f"where the source has other weights: {some(where)}; they were lost, or never written: "
        f"{AGAIN}",
    )  # fmt: skip
