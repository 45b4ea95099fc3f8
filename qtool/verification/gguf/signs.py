"""Blocks of a GGUF file with a scale below 0, of types whose scales no encoder makes so.

    d, dmin     Q2_K, Q4_K, Q5_K: what is taken off is never negative, and d is the largest of
                eight or sixteen scales that are not
    d           Q4_1, Q5_1: the largest less the least weight; IQ1_S, IQ2 and IQ3: the signs are
                stored apart

Others begin with the weight of the largest size, whatever its sign (Q4_0, Q3_K, Q6_K, IQ4), or may
in some program (Q8_0).
Sources: llama.cpp (ggml-quants.c), AutoRound 0.16 (export_to_gguf/packing), kernels/gguf_encode_*.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.gguf_types import BlockType
from qtool.messages.sentences import AGAIN, some
from qtool.messages.sentences import count as counted
from qtool.verification.finding import Finding
from qtool.verification.gguf.single_blocks import Placed

# Where in a block they lie, in bytes.
SCALES: Mapping[str, Mapping[str, int]] = {
    "Q2_K": {"d": 80, "dmin": 82}, "Q4_K": {"d": 0, "dmin": 2}, "Q5_K": {"d": 0, "dmin": 2},
    "Q4_1": {"d": 0}, "Q5_1": {"d": 0},
    "IQ1_S": {"d": 0}, "IQ2_XXS": {"d": 0}, "IQ2_XS": {"d": 0}, "IQ2_S": {"d": 0},
    "IQ3_XXS": {"d": 0}, "IQ3_S": {"d": 0},
}  # fmt: skip
_MINUS_ZERO, _MINUS_INFINITY = 0x8000, 0xFC00


@dataclass(frozen=True)
class Negative(Placed):
    """The weights of the first block with such a scale among some rows, and how many there are."""

    scale: str  # d or dmin
    count: int


def negative(raw: NDArray[np.uint8], block: BlockType, columns: int) -> Negative | None:
    """Of some rows as they are stored. columns: weights of a row."""
    blocks = raw.view(np.uint8).reshape(-1, block.nbytes)
    total, first = 0, (len(blocks), "")
    for scale, at in SCALES.get(block.name, {}).items():
        halves = blocks[:, at : at + 2].copy().view(np.uint16)[:, 0]
        below = (halves > _MINUS_ZERO) & (halves < _MINUS_INFINITY)
        if below.any():
            total += int(below.sum())
            first = min(first, (int(below.argmax()), scale))
    if not total:
        return None
    row, part = divmod(first[0], columns // block.weights)
    return Negative(row, range(part * block.weights, (part + 1) * block.weights), first[1], total)


def told(found: Mapping[str, Sequence[Negative]]) -> Iterator[Finding]:
    """values: one warning, of the tensor with the most first. found: by tensor."""
    if not found:
        return
    counts = {name: sum(one.count for one in several) for name, several in found.items()}
    names = sorted(found, key=lambda name: -counts[name])
    total = sum(counts.values())
    yield Finding(
        "warning", "values", names[0],
        f"{counted(total, 'scale')} of blocks below 0, as no known encoder of "
        f"{'its type' if total == 1 else 'their types'} writes any: {some(names)} (the first: "
        f"{found[names[0]][0].scale} of {found[names[0]][0].place}); the weights there have other "
        f"signs or sizes than meant, unless an unknown program made the file: {AGAIN}",
    )  # fmt: skip
