"""What is asked of `qtool matrix`, and what came of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool import __version__
from qtool.matrix.state import Entry, row

if TYPE_CHECKING:
    from qtool.cuda.device import Device


@dataclass(frozen=True)
class Asked:
    """What the user wants."""

    model: str
    recipes: tuple[str, ...]
    out: Path
    sets: tuple[str, ...]  # of calibration
    threads: int
    max_shard_bytes: int
    error_aware: bool = False
    text: Path | None = None  # to measure quality on
    windows: int | None = None
    command: str = "qtool matrix"
    fresh: bool = False  # what is unfinished is thrown away
    changes: tuple[str, ...] = ()  # `key=value` put over each recipe's own, none of calibration
    device: "Device | None" = None  # that does the work; None: the CPU

    @property
    def gpu(self) -> str | None:
        """Its name."""
        return None if self.device is None else self.device.name


@dataclass
class Matrix:
    """What came of it."""

    model: str
    out: str
    artifacts: list[Entry]
    changes: tuple[str, ...] = ()
    passes: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, Any] | None = None  # statistics that a run could go on with
    report: str | None = None
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    gpu: str | None = None  # that did the work, if not the CPU

    @property
    def failed(self) -> list[Entry]:
        """Those that are not there."""
        return [one for one in self.artifacts if one.status == "failed"]

    def json(self) -> dict[str, Any]:
        """The --json object."""
        return {
            "qtool_version": __version__,
            "model": self.model,
            "out": self.out,
            "changes": list(self.changes),
            "gpu": self.gpu,
            "artifacts": [row(one) for one in self.artifacts],
            "passes": self.passes,
            "failed": [one.recipe for one in self.failed],
            "kept_statistics": self.kept,
            "report": self.report,
            "seconds": round(self.seconds, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
        }
