"""A recipe as artifacts record it: every key with its value, and no path of this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qtool.recipe.gguf import GgufRecipe
    from qtool.recipe.recipe import Recipe


def portable(
    recipe: "Recipe | GgufRecipe", calibrated: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Every key of the recipe; the path of a calibration file gives way to the word `file`.

    `calibrated`, what really was, counts where statistics came from a file of other settings.
    """
    keys = recipe.effective()
    if calibrated is not None and calibrated.get("error_aware") is False:
        known = keys["calibration"]
        known.pop("precision", None)
        known.update({k: calibrated[k] for k in (*known, "precision") if k in calibrated})
        return keys
    source = recipe.calibration.source
    if source is not None and Path(source).exists():
        keys["calibration"]["source"] = "file"
    return keys
