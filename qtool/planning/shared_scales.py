"""Scales of a whole matrix that several matrices have to share.

Engines fuse q/k/v and gate/up (w1/w3 of each expert) into one layer, which has one scale of the
whole matrix where the format has such a scale: FP8 per tensor, the outer scale of NVFP4. Files that
give each part its own are loaded with the largest of them, and other weights than were written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.layer_names import FUSED
from qtool.formats.safetensors_file import to_float32
from qtool.planned import Planned
from qtool.planning.plan import Plan

if TYPE_CHECKING:
    import torch

_AT_ONCE = 1 << 24  # bytes of a matrix that are read together


def shard_key(module: str) -> str:
    """Modules with one key are parts of one fused matrix; of experts, those of one expert."""
    parent, _, last = module.rpartition(".")
    for fused, parts in FUSED:
        if last in parts:
            return f"{parent}.{fused}"
    return module


class SharedScales:
    """max|w| over the parts of each fused matrix; safe to ask from several threads."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._parts: dict[str, list[Planned]] = defaultdict(list)
        for planned in plan.quantized:
            scheme = planned.scheme
            if scheme is not None and (
                (scheme.rows < 0 and scheme.is_float) or scheme.outer == "divides"
            ):
                self._parts[shard_key(planned.module)].append(planned)
        self._locks = {key: Lock() for key in self._parts}
        self._found: dict[str, float] = {}

    def largest(
        self, planned: Planned, block: Mapping[str, torch.Tensor] | None = None
    ) -> float | None:
        """None where a matrix shares its scale with no other. block: weights by name, where they
        are no longer those of the checkpoint; the first of its parts to be rounded asks first."""
        key = shard_key(planned.module)
        if len(self._parts.get(key, ())) < 2:
            return None
        with self._locks[key]:
            if key not in self._found:
                self._found[key] = max(self._top(part, block) for part in self._parts[key])
            return self._found[key]

    def largest_of_all(self, planned: Planned) -> float:
        """largest(), of the matrix alone where it shares its scale with no other."""
        found = self.largest(planned)
        return self._top(planned, None) if found is None else found

    def _top(self, planned: Planned, block: Mapping[str, torch.Tensor] | None) -> float:
        if block is not None and planned.name in block:
            return float(block[planned.name].abs().max())
        rows, columns = planned.shape
        step = max(1, _AT_ONCE // (4 * columns))
        top = 0.0
        for first in range(0, rows, step):
            last = min(rows, first + step)
            raw = self._checkpoint.part(planned.name, first, last)
            part = to_float32(raw, planned.dtype, (last - first, columns))
            top = max(top, float(np.abs(part).max()))
        return top
