"""Sensitivities in a file of a run's hidden folder, which the run's journal knows.

    sensitivity-NAME := float64*     of one matrix after another: by its rows, by its columns

The journal's line says which matrices these are, and has the file's checksum: what is not as it
says is measured again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtool.gradients.sensitivity import Sensitivity
from qtool.native.sums import checksum

# A checkpoint tensor, an expert's number or -1, and what its errors cost.
Named = list[tuple[str, int, Sensitivity]]


def write(path: Path, named: Named) -> dict[str, Any]:
    """What the journal is to have of it."""
    parts = [part for _, _, one in named for part in (one.rows, one.columns)]
    raw = np.concatenate([np.empty(0), *parts]).view(np.uint8)
    path.write_bytes(raw.data)
    matrices = [[name, expert, s.count, s.rows.size, s.columns.size] for name, expert, s in named]
    return {"matrices": matrices, "sums": checksum(raw)}


def read(path: Path, entry: Mapping[str, Any]) -> Named | None:
    """None where it is not there, or not whole. entry: what write() said."""
    shapes = _shapes(entry)
    if shapes is None:
        return None
    try:
        numbers = np.fromfile(path, np.float64)
    except OSError:
        return None
    sizes = [size for _, _, _, *pair in shapes for size in pair]
    if numbers.size != sum(sizes) or checksum(numbers.view(np.uint8)) != entry.get("sums"):
        return None
    parts = iter(np.split(numbers, np.cumsum(sizes)[:-1]) if sizes else ())
    return [(n, e, Sensitivity(next(parts), next(parts), count)) for n, e, count, _, _ in shapes]


def _shapes(entry: Mapping[str, Any]) -> list[Any] | None:
    """What write() said of the matrices; None of a line that it never made."""
    found = entry.get("matrices")
    good = isinstance(found, list) and all(
        isinstance(one, list)
        and len(one) == 5
        and isinstance(one[0], str)
        and type(one[1]) is int
        and all(type(number) is int and number >= 0 for number in one[2:])
        for one in found
    )
    return found if isinstance(found, list) and good else None
