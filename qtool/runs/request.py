"""What `qtool quantize` was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.errors import UnsupportedError, UsageError
from qtool.hub import plain_name
from qtool.recipe.recipe import Recipe

if TYPE_CHECKING:
    from qtool.cuda.device import Device
    from qtool.workspaces.naming import Stating
    from qtool.workspaces.replacing import Replace


@dataclass(frozen=True)
class Request:
    """What the user asked for; `model` is as typed, `source` is the folder it was resolved to."""

    model: str
    source: Path
    recipe: Recipe
    out: Path | None
    stats: Path | None
    threads: int
    max_shard_bytes: int
    fresh: bool = False  # what an earlier run left is thrown away
    max_ram: int | None = None  # bytes of resident memory
    stating: "Stating | None" = None  # of the workspace
    device: "Device | None" = None  # that does the work; None: the CPU
    replace: "Replace | None" = None  # an earlier artifact
    requantize: bool = False  # a quantized checkpoint may be the source

    @property
    def artifact(self) -> Path:
        """Where the artifact goes."""
        return artifact_path(self.model, self.recipe, self.out)


def artifact_path(model: str, recipe: Recipe, out: Path | None) -> Path:
    """OUT, or MODEL-RECIPE in the working folder."""
    if out is not None:
        return out
    return Path(f"{plain_name(model)}-{recipe.name}")


def check_names(*names: object) -> None:
    """UnsupportedError for a name of a file that records, which are JSON and GGUF, cannot hold."""
    for name in map(str, names):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UnsupportedError(
                f"{name}: the name is no UTF-8, which names in JSON and GGUF have to be; rename "
                "it, or set a locale of UTF-8"
            ) from None


def check_device(device: str) -> None:
    """UnsupportedError where the work cannot be done on `device`, before anything is begun;
    UsageError for the name of none.

    auto is the CPU: what a recipe makes must not depend on whether a GPU happens to be there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device}: expected auto, cpu or cuda")
    if device == "cuda":
        from qtool.cuda.running import require

        require()


def device_of(asked: str, *, ways_back: bool = True) -> "Device | None":
    """What --device asks for, None: the CPU; UnsupportedError as check_device. ways_back: whether
    gradients may be wanted."""
    check_device(asked)
    if asked != "cuda":
        return None  # without importing torch
    from qtool.cuda.device import open_gpu

    return open_gpu(ways_back=ways_back)


def check_max_ram(device: str, max_ram: object) -> None:
    """UnsupportedError where both are asked for."""
    if device == "cuda" and max_ram is not None:
        raise UnsupportedError(
            "--max-ram counts what the CPU's way takes, not a GPU's libraries and pinned memory: "
            "leave it out with --device cuda"
        )


def check_stats_options(stats: Path | None, given: Sequence[str]) -> None:
    """UnsupportedError where options ask for another calibration than statistics already had."""
    if stats is not None and given:
        raise UnsupportedError(
            f"--stats {stats} was calibrated when it was made; {', '.join(given)} would change "
            "nothing: leave them out, or give them to `qtool calibrate`"
        )
