"""What a recipe is applied to: a checkpoint, or one that is quantized seen as a plain one."""

import re
from collections.abc import Collection
from pathlib import Path

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import well_named
from qtool.checkpoints.single_experts import stacked
from qtool.errors import SourceError, UnsupportedError

_RELEASED = "mxfp4"
# As PEFT names what an adapter has, and the layer below it.
_ADAPTER = re.compile(r"\.(lora_[AB]|base_layer)\.")


def opened(path: Path, requantize: bool) -> Checkpoint:
    """The checkpoint or, with --requantize, the view of one that is quantized. gpt-oss as it is
    released stays as it is: GGUF recipes keep its experts.

    SourceError where an adapter is not merged: its matrices are none of the model's.
    """
    checkpoint = Checkpoint.open(path)
    _check_merged(path, checkpoint.tensors)
    checkpoint = stacked(well_named(checkpoint))
    if not requantize:
        return checkpoint
    if _format(checkpoint) in ("dense", _RELEASED):
        return checkpoint
    # What knows formats takes longer to import than headers to read.
    from qtool.converting.view import plain_view

    return plain_view(path)


def _check_merged(path: Path, names: Collection[str]) -> None:
    found = [name for name in names if _ADAPTER.search(name)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise SourceError(
            f"{path}: holds an adapter that is not merged into the weights ({found[0]}{more}); "
            "merge it first (PEFT's `model.merge_and_unload()`) and save the model again"
        )


def _format(checkpoint: Checkpoint) -> str:
    from qtool.artifacts.stored_config import quantization_config
    from qtool.formats import detect

    return detect(quantization_config(checkpoint)).format


def check_needed(path: Path, requantize: bool) -> None:
    """UnsupportedError where --requantize would change nothing."""
    if not requantize or (found := _format(Checkpoint.open(path))) not in ("dense", _RELEASED):
        return
    why = f"{path} is not quantized; leave it out"
    if found == _RELEASED:
        why = f"{path} is gpt-oss as it is released; start from what `qtool convert --to hf` makes"
    raise UnsupportedError(f"--requantize would change nothing: {why}")
