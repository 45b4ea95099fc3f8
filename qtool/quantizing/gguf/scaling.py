"""Transforms that scale channels, before a checkpoint is written as GGUF: smooth, AWQ's scales and
smooth-attention, found while importance is measured, block by block:

    inputs of the block -> scales, in its weights -> what the scaled block reads -> the next block

They are those of the recipe with `method: none` and `format: dense`, hence powers of two. What was
found is kept with the block, put over the checkpoint's view before any row is encoded, and written
into the file as `qtool.scales` (qtool.checkpoints.scaled): from the file `qtool verify` scales the
source in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qtool.blockwise.given import recipe_needs
from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import Tracer
from qtool.calibrating.stats import SiteStats, Weights
from qtool.checkpoints.scaled import Scaled, from_json, record_of, to_json
from qtool.planning.plan import Plan, make_plan
from qtool.provenance.outcome import merged
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe
from qtool.streaming.stream import LoadedBlock
from qtool.transforms.chain import apply_in_turn
from qtool.transforms.proved import Subject, takes_part
from qtool.transforms.rotated import Rotated


@dataclass
class Scaling:
    """The scales of a run, as they are found."""

    recipe: Recipe
    plan: Plan
    view: Rotated
    kept: list[Mapping[str, Any]] = field(default_factory=list)  # by block, as the journal has it
    _tracer: Tracer = field(default_factory=Tracer)

    @classmethod
    def of(cls, recipe: GgufRecipe, view: Rotated) -> "Scaling":
        """Before the first block. view: the checkpoint, rotated where it is going to be."""
        chosen = Recipe(
            method=("none",),
            format="dense",
            weights=recipe.rounds_as if recipe.searches_scales else None,
            transforms=recipe.scaling,
            smooth=recipe.smooth,
            smooth_attention=recipe.smooth_attention,
            calibration=recipe.calibration,
        )
        return cls(chosen, make_plan(chosen, view), view)

    def scale(
        self, block: LoadedBlock, passage: Passage, needs: frozenset[str], weights: Weights
    ) -> dict[str, SiteStats]:
        """Find the scales of the next block and put them into its weights, and over the view.

        What it measured, as it is of scaled inputs (to the bit: scales are powers of two), with
        `needs`; nothing where these would take Gram matrices that finding scales does not. weights:
        of some inputs, by which their tokens count.
        """
        stream, workers = passage.stream, passage.workers
        sites = self._tracer.sites(block, stream)
        wanted = [s for s in sites.sites if any(takes_part(self.plan, name) for name in s.names)]
        own = recipe_needs(self.recipe)
        serves = bool(needs) and "gram" in own
        stats = passage.collect(block, wanted, own | needs if serves else own, weights=weights)
        subject = Subject(
            block, sites, self.plan, self.recipe, stream, workers, passage.device, powers=True
        )
        applied = apply_in_turn(self.recipe.transform_chain, subject, stats)
        record = record_of(applied.factors)
        self.view.scales.update(record)
        self.kept.append({"scales": to_json(record), "notes": list(applied.notes)})
        return applied.stats if serves else {}

    def restore(self, kept: Any) -> bool:
        """Take up what was kept of the next block; False where it is not what scale() left."""
        try:
            from_json(kept["scales"])
            good = isinstance(kept["notes"], list)
        except (KeyError, TypeError, ValueError):
            return False
        self.kept += [kept] if good else []
        return good

    @property
    def found(self) -> dict[str, Scaled]:
        """The scales of all blocks, by the checkpoint's names."""
        return {name: one for kept in self.kept for name, one in from_json(kept["scales"]).items()}

    @property
    def notes(self) -> list[str]:
        """Sentences for the summary."""
        return merged([note for kept in self.kept for note in kept["notes"]])
