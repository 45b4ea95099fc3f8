"""What a recipe is applied to: a checkpoint, or one that is quantized seen as a plain one."""

from pathlib import Path

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import well_named
from qtool.errors import UnsupportedError


def opened(path: Path, requantize: bool) -> Checkpoint:
    """The checkpoint or, with --requantize, the view of one that is quantized. gpt-oss as it is
    released stays as it is: GGUF recipes keep its experts."""
    checkpoint = well_named(Checkpoint.open(path))
    if not requantize:
        return checkpoint
    # What knows formats takes longer to import than headers to read.
    from qtool.artifacts.stored_config import quantization_config
    from qtool.converting.view import plain_view
    from qtool.formats import detect, mxfp4

    plain = detect(quantization_config(checkpoint)).format in ("dense", mxfp4.NAME)
    return checkpoint if plain else plain_view(path)


def check_needed(path: Path, requantize: bool) -> None:
    """UnsupportedError where --requantize would change nothing."""
    if requantize and opened(path, requantize).stored_as is None:
        raise UnsupportedError(
            f"--requantize would change nothing: {path} is not quantized, or is gpt-oss as it is "
            "released, of which `qtool convert --to hf` makes a plain checkpoint; leave it out"
        )
