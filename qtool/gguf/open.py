"""What is quantized into GGUF, from wherever it lies: a GGUF file, or a Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from qtool.checkpoints.checkpoint import Watch
from qtool.checkpoints.gguf_models import gguf_models
from qtool.checkpoints.padding import KEY, padded
from qtool.errors import SourceError, UnsupportedError
from qtool.gguf.source import GgufSource

if TYPE_CHECKING:
    from qtool.recipe.gguf import GgufRecipe
    from qtool.transforms.rotated import Rotated


def open_source(path: Path, requantize: bool = False, watch: Watch | None = None) -> GgufSource:
    """The tensors and metadata of a model; headers only. Close it when nothing is read any more.

    requantize: a checkpoint that is quantized is shown as plain numbers. watch: is shown what is
    read of a checkpoint.
    """
    models = gguf_models(path)
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:3])
        raise SourceError(f"{path}: holds {len(models)} GGUF models ({names}); name the file")
    if models:
        from qtool.formats.gguf_file import GgufFile
        from qtool.gguf.from_gguf import gguf_source

        return gguf_source(GgufFile.open(models[0]))
    from qtool.converting.source import opened
    from qtool.gguf.from_hf.source import hf_source

    return hf_source(opened(path, requantize, watch))


def open_view(
    path: Path,
    recipe: "GgufRecipe",
    imatrix: Path | None,
    requantize: bool = False,
    watch: Watch | None = None,
) -> "Rotated | None":
    """Where the recipe pads or has transforms, the checkpoint padded and as transforms change it,
    before anything is changed; hf_source() of it is what is going to be written. requantize: see
    open_source. watch: is shown what is read of it."""
    if not recipe.transforms and recipe.pad_intermediate < 2:
        return None
    _refuse_view(path, recipe, imatrix)
    from qtool.converting.source import opened
    from qtool.gguf.from_hf.experts_apart import experts_apart
    from qtool.transforms.rotated import untied

    checkpoint = opened(path, requantize, watch)
    if recipe.scaling:
        checkpoint = experts_apart(checkpoint)
    checkpoint = padded(checkpoint, recipe.pad_intermediate)
    view = untied(checkpoint, stream=recipe.rotates and recipe.rotate.r1)
    return view.with_exact_vectors() if recipe.scaling else view


def _refuse_view(path: Path, recipe: "GgufRecipe", imatrix: Path | None) -> None:
    """UnsupportedError where a recipe would change what cannot be, or what was measured before."""
    asks = [f"transforms ({', '.join(recipe.transforms)})"] if recipe.transforms else []
    without = ["transforms=[]"] if recipe.transforms else []
    if recipe.pad_intermediate > 1:
        asks.append(f"{KEY} ({recipe.pad_intermediate})")
        without.append(f"{KEY}=0")
    what = " and ".join(asks)
    if gguf_models(path):
        raise UnsupportedError(
            f"{path}: recipe {recipe.name} has {what}, done to Hugging Face checkpoints alone; "
            "turn the file into one first (qtool convert FILE --to hf -o DIR), or leave that out "
            f"({' '.join(f'--set {item}' for item in without)})"
        )
    if imatrix is not None:
        raise UnsupportedError(
            f"--imatrix {imatrix}: importance of the model as it was, and recipe {recipe.name} "
            f"has {what}, which changes what matrices read; let it be measured after that: --set "
            "importance=true"
        )
