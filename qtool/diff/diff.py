"""How two artifacts differ: metadata, tensors that one lacks, storage, and the numbers themselves.

    difference of a tensor = |A - B|_F / |A|_F, and max |A - B|, of dequantized values in float64

Tensors whose bytes are the same are the same. Others are compared by what they stand for, a
million numbers at a time; NaN equals NaN. A tensor that is stored otherwise and stands for the same
numbers is told apart from one whose numbers changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtool.diff.gguf import GgufSide, RenamedSide, open_sides
from qtool.diff.sides import Item, Side, rows_of
from qtool.errors import UnsupportedError
from qtool.messages.progress import Progress

_AT_ONCE = 1 << 20  # numbers, or bytes, of each side
# What differs, the worst first.
KINDS = ("only-a", "only-b", "shape", "undecoded", "values", "storage")
# Keys of config.json that say how a file is stored, not what the model is.
_OF_STORAGE = ("quantization_config", "compression_config", "torch_dtype", "dtype",
               "transformers_version", "_name_or_path")  # fmt: skip


@dataclass(frozen=True)
class Numbers:
    """How far apart the numbers of a tensor are."""

    count: int
    differing: int
    most: float | None  # max |A - B|; None where it is not finite
    relative: float | None  # likewise, and where A is all zeros

    def json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "values": self.count,
            "differing_values": self.differing,
            "max_difference": self.most,
            "relative_difference": self.relative,
        }


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same on both sides."""

    name: str
    kind: str  # one of KINDS
    a: Item | None
    b: Item | None
    numbers: Numbers | None = None
    differing_codes: int | None = None  # where both sides have codes on a like grid
    differing_blocks: int | None = None  # of a GGUF type, where both have the same

    def json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "name": self.name,
            "kind": self.kind,
            "a": None if self.a is None else self.a.json(),
            "b": None if self.b is None else self.b.json(),
            "numbers": None if self.numbers is None else self.numbers.json(),
            "differing_codes": self.differing_codes,
            "differing_blocks": self.differing_blocks,
        }

    @property
    def weight(self) -> tuple[Any, ...]:
        """For sorting: the worst first."""
        relative = 0.0
        if self.numbers is not None:
            relative = math.inf if self.numbers.relative is None else self.numbers.relative
        return KINDS.index(self.kind), -relative, self.name


@dataclass(frozen=True)
class Diff:
    """Everything that differs."""

    a: Side
    b: Side
    names: str  # checkpoint or gguf
    metadata: tuple[tuple[str, Any, Any], ...]  # key, and its values; ABSENT where one has none
    tensors: tuple[TensorDifference, ...]  # the worst first
    same: int  # tensors

    @property
    def different(self) -> bool:
        """Whether anything differs."""
        return bool(self.metadata or self.tensors)

    def counts(self) -> dict[str, int]:
        """How many tensors differ in each way."""
        found = Counter(one.kind for one in self.tensors)
        return {kind: found[kind] for kind in KINDS}

    def json(self) -> dict[str, Any]:
        """The --json object."""
        return {
            "different": self.different,
            "a": _side(self.a),
            "b": _side(self.b),
            "names": self.names,
            "same": self.same,
            "counts": self.counts() | {"metadata": len(self.metadata)},
            "metadata": [
                {"key": key}
                | {side: value for side, value in (("a", a), ("b", b)) if value != ABSENT}
                for key, a, b in self.metadata
            ],
            "tensors": [one.json() for one in self.tensors],
        }


class _Absent:
    def __repr__(self) -> str:
        return "-"


ABSENT = _Absent()


def _side(side: Side) -> dict[str, Any]:
    items = side.items.values()
    return {
        "path": str(side.path),
        "format": side.format,
        "tensors": len(items),
        "bytes": sum(item.nbytes for item in items),
    }


def diff(a: Path, b: Path, progress: Progress) -> Diff:
    """Compare two artifacts; raises what opening them raises."""
    first, second = open_sides(a, b)
    names = list(dict.fromkeys([*first.items, *second.items]))
    found = []
    for number in progress.blocks(len(names), "tensor"):
        one = _tensor(first, second, names[number])
        if one is not None:
            found.append(one)
    return Diff(
        first,
        second,
        "gguf" if isinstance(first, GgufSide) else "checkpoint",
        tuple(_metadata(first, second)),
        tuple(sorted(found, key=lambda one: one.weight)),
        len(names) - len(found),
    )


def _metadata(a: Side, b: Side) -> Iterable[tuple[str, Any, Any]]:
    """Keys whose values differ; of a GGUF file and a checkpoint those that both have."""
    left, right = a.metadata, b.metadata
    mixed = isinstance(a, RenamedSide) or isinstance(b, RenamedSide)
    for key in dict.fromkeys([*left, *right]):
        values = left.get(key, ABSENT), right.get(key, ABSENT)
        if mixed and (ABSENT in values or key.partition(".")[0] in _OF_STORAGE):
            continue
        if type(values[0]) is not type(values[1]) or values[0] != values[1]:
            yield key, *values


def _tensor(a: Side, b: Side, name: str) -> TensorDifference | None:
    """How one tensor differs; None where it is the same on both sides."""
    left, right = a.items.get(name), b.items.get(name)
    if left is None or right is None:
        return TensorDifference(name, "only-a" if right is None else "only-b", left, right)
    if left.shape != right.shape:
        return TensorDifference(name, "shape", left, right)
    if _same_bytes(a, b, name):
        return None
    try:
        numbers = _numbers(a, b, left)
    except UnsupportedError:
        return TensorDifference(name, "undecoded", left, right)
    mixed = isinstance(a, RenamedSide) or isinstance(b, RenamedSide)
    if mixed and not numbers.differing and (left.scheme, left.dtype) == (right.scheme, right.dtype):
        return None  # but for the order of the rows, which is the format's
    kind = "values" if numbers.differing else "storage"
    codes = _differing_codes(a, b, name)
    blocks = _differing_blocks(a, b, left, right)
    return TensorDifference(name, kind, left, right, numbers, codes, blocks)


def _same_bytes(a: Side, b: Side, name: str) -> bool:
    left, right = a.stored(name), b.stored(name)
    if [one.label for one in left] != [one.label for one in right]:
        return False
    for mine, theirs in zip(left, right, strict=True):
        for start in range(0, mine.nbytes, _AT_ONCE):
            count = min(_AT_ONCE, mine.nbytes - start)
            if not np.array_equal(mine.read(start, count), theirs.read(start, count)):
                return False
    return True


def _numbers(a: Side, b: Side, item: Item) -> Numbers:
    """Both sides' values, some rows at a time."""
    rows = rows_of(item.shape)
    step = max(1, _AT_ONCE // max(1, item.shape[-1] if item.shape else 1))
    count = differing = 0
    most = squares = norm = 0.0
    for first in range(0, rows, step):
        last = min(rows, first + step)
        left, right = a.rows(item.name, first, last), b.rows(item.name, first, last)
        count += left.size
        unequal = (left != right) & ~(np.isnan(left) & np.isnan(right))
        with np.errstate(over="ignore", invalid="ignore"):
            norm += float(np.square(left, dtype=np.float64).sum())
            if not (here := int(np.count_nonzero(unequal))):
                continue
            differing += here
            apart = left[unequal].astype(np.float64) - right[unequal]
            most = max(most, float(np.abs(apart).max()), key=_worse)
            squares += float(np.square(apart).sum())
    relative = math.sqrt(squares / norm) if norm > 0 and math.isfinite(squares / norm) else None
    if not differing:
        relative = 0.0
    return Numbers(count, differing, most if math.isfinite(most) else None, relative)


def _worse(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _differing_codes(a: Side, b: Side, name: str) -> int | None:
    left, right = a.quant(name), b.quant(name)
    if left is None or right is None:
        return None
    one, other = left.scheme, right.scheme
    if (one.bits, one.book, one.group_size) != (other.bits, other.book, other.group_size):
        return None
    return int(np.count_nonzero(left.codes != right.codes))


def _differing_blocks(a: Side, b: Side, left: Item, right: Item) -> int | None:
    """Blocks of a GGUF type whose bytes differ."""
    if not (isinstance(a, GgufSide) and isinstance(b, GgufSide)) or left.dtype != right.dtype:
        return None
    if left.name in a.views or left.name in b.views:
        return None
    size = a.file.tensors[left.name].type.nbytes
    (mine,), (theirs,) = a.stored(left.name), b.stored(left.name)
    step = max(1, _AT_ONCE // size) * size
    found = 0
    for start in range(0, mine.nbytes, step):
        count = min(step, mine.nbytes - start)
        unequal = mine.read(start, count) != theirs.read(start, count)
        found += int(np.count_nonzero(unequal.reshape(-1, size).any(axis=1)))
    return found
