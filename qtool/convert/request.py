"""What `qtool convert` is asked for, and what it says on the way."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qtool.convert.targets import Target
from qtool.runs.progress import Progress
from qtool.runs.replacing import Replace, replace_of


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    source: Path
    target: Target
    out: Path
    lossy: bool = False
    dtype: str | None = None  # of what is dequantized
    assume: str | None = None  # v1 or v2: how GPTQ's zeros are stored, whatever the config says
    max_shard_bytes: int = 5_000_000_000
    replaces: bool = False  # an earlier artifact
    fresh: bool = False  # throw away what an earlier run left

    @property
    def replace(self) -> Replace | None:
        """What `out` may take the place of."""
        return replace_of(self.source) if self.replaces else None


def say_all(warnings: Iterable[str], progress: Progress) -> None:
    """Warnings, before the work."""
    for warning in warnings:
        progress.say(f"warning: {warning}")
