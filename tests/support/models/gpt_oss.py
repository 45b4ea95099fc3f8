"""Recipes of gpt-oss's own format, which take no other model, and a small one for them."""

from pathlib import Path

from qtool.recipe.recipe import load, shipped
from support.gguf import gguf_models
from support.runs import quantizing

OWN = tuple(name for name in shipped() if load(name).format == "mxfp4")


def plain(folder: Path) -> Path:
    """A random gpt-oss with experts in numbers, and a tokenizer."""
    return quantizing.add_tokenizer(gguf_models.build("gpt-oss", folder, dtype="bfloat16"))


def source_for(recipe: str, usual: Path, folder: Path) -> Path:
    """`usual`, but for such a recipe a gpt-oss, made in `folder`."""
    return plain(folder) if recipe in OWN else usual
