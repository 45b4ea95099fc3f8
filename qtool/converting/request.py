"""What `qtool convert` is asked for, and what it says on the way."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qtool.converting.targets import Target
from qtool.errors import UsageError
from qtool.messages.progress import Progress
from qtool.workspaces.replacing import Replace, replace_of

DTYPES = ("float16", "bfloat16", "float32")


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


def check_choices(dtype: str | None, assume: str | None) -> None:
    """UsageError for a value that there is none of."""
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")
    if assume not in (None, "v1", "v2"):
        raise UsageError(f"--assume {assume}: expected v1 or v2")


def say_all(warnings: Iterable[str], progress: Progress) -> None:
    """Warnings, before the work."""
    for warning in warnings:
        progress.say(f"warning: {warning}")
