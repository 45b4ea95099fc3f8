"""Several artifacts of one model, measured on one text: what `qtool compare` finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError
from qtool.quality.evaluate import Evaluation
from qtool.quality.pareto import front, kld
from qtool.report.plots import Point, pareto


@dataclass(frozen=True)
class Compared:
    """What was measured of each, and why some could not be."""

    against: str
    found: tuple[Evaluation, ...]
    failed: Mapping[Path, QtoolError]

    @cached_property
    def front(self) -> set[str]:
        """The artifacts that no other is both smaller and nearer than."""
        return front(list(self.found))

    def svg(self) -> str:
        """Size against the logarithm of KL divergence, the front joined by a line; no scripts."""
        points = [
            Point(
                str(number),
                one.artifact.rsplit("/", 1)[-1],
                one.size_bytes,
                kld(one),
                one.artifact in self.front,
            )
            for number, one in enumerate(self.found, 1)
        ]
        return f"{pareto(points, alone=True)}\n"

    def json(self) -> dict[str, Any]:
        """The --json object."""
        rows = [one.json() | {"front": one.artifact in self.front} for one in self.found]
        left = [{"artifact": str(path), "error": str(why)} for path, why in self.failed.items()]
        return {"against": self.against, "artifacts": rows, "failed": left}
