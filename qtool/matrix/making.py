"""One artifact of a matrix: the run that `qtool quantize` would begin."""

from pathlib import Path

from qtool.checkpoints.gguf_models import is_gguf
from qtool.matrix.asked import Asked
from qtool.matrix.cells import Cell
from qtool.matrix.shared import Measured
from qtool.messages.progress import Progress
from qtool.messages.summary import Summary
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe


def make(
    asked: Asked, source: Path, cell: Cell, measured: Measured | None, progress: Progress
) -> Summary:
    """Make the artifact of a cell, from what one pass measured or by itself."""
    if isinstance(cell.recipe, GgufRecipe):
        from qtool.quantizing.gguf.quantize import run_gguf
        from qtool.runs.gguf_request import GgufRequest

        imatrix = None if measured is None else measured.imatrix
        places = None
        if asked.device is not None:
            from qtool.cuda import staging

            places = staging.places()
        return run_gguf(
            GgufRequest(
                asked.model,
                source,
                cell.recipe,
                cell.out,
                asked.threads,
                imatrix,
                fresh=asked.fresh,
                places=places,
                device=asked.device if cell.recipe.sweeps else None,
            ),
            progress,
        )
    return _folder(asked, source, cell.recipe, cell, measured, progress)


def _folder(
    asked: Asked,
    source: Path,
    recipe: Recipe,
    cell: Cell,
    measured: Measured | None,
    progress: Progress,
) -> Summary:
    from qtool.quantizing.pipeline import run as quantize
    from qtool.runs.request import Request

    def made_of(folder: Path) -> Summary:
        stats = None if measured is None else measured.stats
        request = Request(
            asked.model,
            folder,
            recipe,
            cell.out,
            stats,
            asked.threads,
            asked.max_shard_bytes,
            fresh=asked.fresh,
            device=asked.device,
        )
        return quantize(request, progress)

    if not is_gguf(source):
        return made_of(source)
    from qtool.converting.gguf_to_hf import checkpoint_folder

    with checkpoint_folder(source, cell.out, progress, requantize=False) as folder:
        return made_of(folder)
