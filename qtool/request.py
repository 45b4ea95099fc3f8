"""What `qtool quantize` was asked for."""

from dataclasses import dataclass
from pathlib import Path

from qtool.recipe import Recipe


@dataclass(frozen=True)
class Request:
    """What the user asked for; `model` is as typed, `source` is the folder it was resolved to."""

    model: str
    source: Path
    recipe: Recipe
    out: Path | None
    stats: Path | None
    threads: int
    max_shard_bytes: int

    @property
    def artifact(self) -> Path:
        """Where the artifact goes."""
        return artifact_path(self.model, self.recipe, self.out)


def artifact_path(model: str, recipe: Recipe, out: Path | None) -> Path:
    """OUT, or MODEL-RECIPE in the working folder."""
    if out is not None:
        return out
    name = Path(model).name or Path(model).resolve().name
    return Path(f"{name.removesuffix('.safetensors')}-{recipe.name}")
