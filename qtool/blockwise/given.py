"""What a recipe needs to know of a model's activations, and what a run is given for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.calibrating.same_model import check_same_model, probe
from qtool.calibrating.stats_file import StatsFile
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.messages.progress import Progress
from qtool.methods import gptq
from qtool.recipe.recipe import Recipe
from qtool.texts.calibration import calibration_tokens
from qtool.transforms import awq, smooth


@dataclass(frozen=True)
class Given:
    """What flows through the blocks, and where statistics come from."""

    tokens: NDArray[np.int64]  # [samples, length]
    saved: StatsFile | None  # None: collected on the way
    record: dict[str, Any]  # of the calibration, for provenance


def recipe_needs(recipe: Recipe) -> frozenset[str]:
    """The statistics that a recipe's methods and transforms ask for."""
    needs = frozenset[str]()
    if "awq" in recipe.transform_chain:
        needs |= awq.NEEDS
    if "smooth" in recipe.transform_chain:
        needs |= smooth.needs(recipe)
    if recipe.rounding == "gptq":
        needs |= gptq.NEEDS
    if recipe.measures_inputs or recipe.reports_outliers:
        needs |= {"max_abs"}
    return needs


def unserved(recipe: Recipe) -> str | None:
    """Why statistics that were measured before serve a recipe nothing."""
    if recipe.rotates:
        return f"statistics are of the model as it was, and recipe {recipe.name} rotates it"
    if recipe.pad_intermediate > 1:
        return (
            f"statistics are of the model as it was, and recipe {recipe.name} pads its widths "
            f"({recipe.pad_intermediate})"
        )
    if recipe.measures_cache:
        return (
            "a statistics file holds nothing of keys and values, for which recipe "
            f"{recipe.name} stores scales"
        )
    if recipe.follows_original:
        why = (
            "tune the scales of each block"
            if recipe.tunes
            else "compensate for what is lost (gptaq)"
        )
        return f"a statistics file holds no text, which recipe {recipe.name} needs to {why}"
    if recipe.measures_ranges:
        return (
            "a statistics file holds no histograms, which activations.observer of recipe "
            f"{recipe.name} needs (minmax needs none)"
        )
    return None


def check_stats(recipe: Recipe, stats: Path) -> None:
    """UnsupportedError where they serve a recipe nothing."""
    if (why := unserved(recipe)) is not None:
        raise UnsupportedError(f"--stats {stats}: {why}; run without --stats")


def given_to(
    recipe: Recipe, checkpoint: Checkpoint, stats: Path | None, progress: Progress
) -> Given:
    """The text, or the file of statistics; SourceError where it does not go with the model."""
    if stats is None:
        calibration = calibration_tokens(recipe.calibration, checkpoint.folder, progress)
        return Given(calibration.tokens, None, {**calibration.record(), "error_aware": True})
    saved = StatsFile.open(stats)
    record = check_same_model(saved, checkpoint)
    record = {**record, "error_aware": False}
    if (gpu := saved.metadata.get("gpu")) is not None:
        record["gpu"] = gpu
    return Given(probe(checkpoint).tokens, saved, record)
