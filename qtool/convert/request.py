"""What `qtool convert` is asked for."""

from dataclasses import dataclass
from pathlib import Path

from qtool.convert.targets import Target


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
