"""What was asked for of a recipe that makes a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.hub import plain_name
from qtool.recipe.gguf import GgufRecipe
from qtool.workspaces.naming import Stating

if TYPE_CHECKING:
    from qtool.cuda.device import Device
    from qtool.cuda.staging import Places
    from qtool.workspaces.replacing import Replace


@dataclass(frozen=True)
class GgufRequest:
    """What the user asked for; `model` is as typed, `source` is what it was resolved to."""

    model: str
    source: Path
    recipe: GgufRecipe
    out: Path | None
    threads: int
    imatrix: Path | None = None
    requantize: bool = False  # tensors of a quantized type may be encoded anew
    fresh: bool = False  # what an earlier run left is thrown away
    max_ram: int | None = None  # bytes of resident memory
    stating: Stating | None = None  # of the workspace
    places: "Places | None" = None  # of a GPU that encodes what it can
    device: "Device | None" = None  # that measures and sweeps; of recipes that sweep alone
    replace: "Replace | None" = None  # an earlier file

    @property
    def artifact(self) -> Path:
        """Where the file goes."""
        return artifact_path(self.model, self.recipe, self.out)


def unlike_gguf(target: Path) -> list[str]:
    """A sentence on the name of a GGUF file that hides what it is."""
    if target.suffix.lower() == ".gguf":
        return []
    return [f"{target} is one GGUF file; most programs know them by a name that ends in .gguf"]


def artifact_path(model: str, recipe: GgufRecipe, out: Path | None) -> Path:
    """OUT, or MODEL-RECIPE.gguf in the working folder."""
    if out is not None:
        return out
    return Path(f"{plain_name(model)}-{recipe.name}.gguf")
