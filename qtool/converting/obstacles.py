"""What stands against an exact conversion, and the one sentence that says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qtool.converting.targets import Target
from qtool.errors import UnsupportedError

SCALES = "its scales are rounded"
ZEROS = "its zero points are rounded"
OFFSETS = "its minimums are rounded"
ANEW = "it is encoded anew"
ROUNDED = "it is rounded"


@dataclass(frozen=True)
class Obstacle:
    """Why a tensor cannot be stored exactly; `lossy` is what can be done about it, if anything."""

    name: str
    reason: str
    lossy: str | None = None
    hint: str = ""


def refuse(path: Path, target: Target, obstacles: Sequence[Obstacle], lossy: bool) -> None:
    """UnsupportedError naming the first tensor and how many, unless `lossy` gets around all."""
    hard = [obstacle for obstacle in obstacles if obstacle.lossy is None]
    left = hard if hard or lossy else obstacles
    if not left:
        return
    first = left[0]
    others = len({obstacle.name for obstacle in left}) - 1
    ways = [first.hint] if first.hint else []
    if not hard:
        ways.append(f"with --lossy {first.lossy}, and the error is recorded")
    more = f" (and {others} more tensors)" if others > 0 else ""
    way = f"; {'; or '.join(ways)}" if ways else ""
    how = ", with --lossy neither" if lossy else " exactly"
    raise UnsupportedError(
        f"{path}: cannot become {target.name}{how}: {first.name} {first.reason}{more}{way}"
    )
