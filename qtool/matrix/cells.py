"""What `qtool matrix` makes: one cell a recipe, and how each of them is calibrated.

no data      the recipe looks at no activations
shared       from the one pass over the unquantized model: statistics, or importance for GGUF
itself       by its own passes: later blocks see quantized ones (all of them with
             --error-aware; and recipes that change the network before, pad its widths, or
             measure keys and values, of which a file of statistics knows nothing)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qtool.errors import RecipeError, UsageError
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.portable import portable
from qtool.recipe.recipe import Calibration, Recipe, load

Calibrated = Literal["no data", "shared", "itself"]
# Transforms that read the statistics of the block as it is.
_FROM_STATISTICS = frozenset({"awq", "smooth"})


@dataclass(frozen=True)
class Cell:
    """One artifact."""

    recipe: Recipe | GgufRecipe
    out: Path
    calibrated: Calibrated
    settings: Calibration  # of the pass that it shares, or of its own

    @property
    def name(self) -> str:
        """The recipe's."""
        return self.recipe.name

    @property
    def is_folder(self) -> bool:
        """Or a GGUF file."""
        return isinstance(self.recipe, Recipe)

    def wanted(self) -> dict[str, Any]:
        """What tells it from an artifact of the same name that was made otherwise."""
        keys = portable(self.recipe)
        keys.pop("calibration", None)
        return {"recipe": {"name": self.name, **keys}, "calibrated": self.calibrated}


def cells(
    recipes: Sequence[str],
    folder: Path,
    sets: Sequence[str],
    *,
    share: bool,
    error_aware: bool,
    changes: Sequence[str] = (),
) -> list[Cell]:
    """One a recipe, in the order of the work: what needs no data first, then what shares the
    pass, then what is calibrated by itself.

    share: False where the source has no checkpoint that a pass could serve (a GGUF file). changes:
    `key=value` put over the keys of each of them. RecipeError for what does not exist, or does not
    go with `changes`; UsageError for two of one name.
    """
    found: dict[str, Cell] = {}
    for name in recipes:
        _check(name, recipes, changes)
        recipe = _load(name, changes, sets)
        if recipe.name in found:
            raise UsageError(
                f"--recipes has two of the name {recipe.name}; give the files other names"
            )
        out = folder / (recipe.name if isinstance(recipe, Recipe) else f"{recipe.name}.gguf")
        calibrated, settings = _calibrated(recipe, share and not error_aware), recipe.calibration
        if calibrated == "shared" and isinstance(recipe, GgufRecipe):
            recipe = _load(name, changes, ())  # importance comes from a file, as with --imatrix
        found[recipe.name] = Cell(recipe, out, calibrated, settings)
    order: tuple[Calibrated, ...] = ("no data", "shared", "itself")
    return sorted(found.values(), key=lambda cell: order.index(cell.calibrated))


def _check(name: str, recipes: Sequence[str], changes: Sequence[str]) -> None:
    """RecipeError where there is no such recipe, or `changes` do not go with it."""
    if (error := _error(name, ())) is not None:
        raise RecipeError(f"--recipes: {error}")
    if (error := _error(name, changes)) is None:
        return
    others = (other for other in recipes if other != name and _error(other, changes) is None)
    if (other := next(others, None)) is not None:
        error += f"; for {other} alone, write it into a recipe file of your own"
    raise RecipeError(error)


def _error(name: str, changes: Sequence[str]) -> str | None:
    try:
        load(name, changes)
    except RecipeError as error:
        return str(error)
    return None


def _load(name: str, changes: Sequence[str], sets: Sequence[str]) -> Recipe | GgufRecipe:
    """A recipe; those that measure nothing have no use for `sets`, which are of calibration."""
    full = load(name, [*changes, *sets])
    return full if full.calibrates else load(name, changes)


def _calibrated(recipe: Recipe | GgufRecipe, share: bool) -> Calibrated:
    if not recipe.calibrates:
        return "no data"
    if not share or recipe.pad_intermediate > 1:
        return "itself"
    if isinstance(recipe, GgufRecipe):
        return "itself" if recipe.transforms or recipe.sweeps else "shared"
    fits = _FROM_STATISTICS.issuperset(recipe.transform_chain)
    fits = fits and not (recipe.measures_cache or recipe.follows_original)
    return "shared" if fits else "itself"


def passes(found: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that share a pass, by what they are calibrated on."""
    groups: dict[str, list[Cell]] = {}
    for cell in found:
        if cell.calibrated == "shared":
            groups.setdefault(cell.settings.model_dump_json(), []).append(cell)
    return list(groups.values())
