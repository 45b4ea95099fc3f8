"""What a recipe is applied to: a checkpoint, or one that is quantized seen as a plain one."""

from dataclasses import replace
from pathlib import Path

from qtool.checkpoints.checkpoint import Checkpoint, Watch
from qtool.checkpoints.fused_experts import well_named
from qtool.checkpoints.single_experts import stacked
from qtool.errors import UnsupportedError

_RELEASED = "mxfp4"


def opened(path: Path, requantize: bool, watch: Watch | None = None) -> Checkpoint:
    """The checkpoint or, with --requantize, the view of one that is quantized. gpt-oss as it is
    released stays as it is: GGUF recipes keep its experts."""
    checkpoint = stacked(well_named(replace(Checkpoint.open(path), watch=watch)))
    view = plain(path, watch) if requantize else None
    return checkpoint if view is None else view


def plain(path: Path, watch: Watch | None = None) -> Checkpoint | None:
    """The view of what is quantized; None of what is not."""
    if _format(Checkpoint.open(path)) in ("dense", _RELEASED):
        return None
    # What knows formats takes longer to import than headers to read.
    from qtool.converting.view import plain_view

    return plain_view(path, watch)


def _format(checkpoint: Checkpoint) -> str:
    from qtool.artifacts.stored_config import detected

    return detected(checkpoint).format


def check_needed(path: Path, requantize: bool) -> None:
    """UnsupportedError where --requantize would change nothing."""
    if not requantize or (found := _format(Checkpoint.open(path))) not in ("dense", _RELEASED):
        return
    why = f"{path} is not quantized; leave it out"
    if found == _RELEASED:
        why = f"{path} is gpt-oss as it is released; start from what `qtool convert --to hf` makes"
    raise UnsupportedError(f"--requantize would change nothing: {why}")
