"""A model's name and a recipe into what would come of them: what `qtool plan` does.

Headers are read, and nothing is loaded or written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.errors import SourceError, UnsupportedError
from qtool.messages.remarks import told_apart

if TYPE_CHECKING:
    from qtool.planning.gguf.planned import GgufPlan
    from qtool.planning.plan import Plan
    from qtool.recipe.file import Calibration
    from qtool.recipe.gguf import GgufRecipe
    from qtool.recipe.recipe import Recipe
    from qtool.verification.finding import Finding


@dataclass(frozen=True)
class Asked:
    """What was asked for, as far as both kinds of recipe know it."""

    model: str
    recipe: str
    sets: tuple[str, ...] = ()
    calibration: str | None = None
    samples: int | None = None
    length: int | None = None
    max_shard_size: str | None = None
    imatrix: Path | None = None
    requantize: bool = False
    threads: int | None = None
    max_ram: int | None = None
    engine: str | None = None
    tp: int = 1


@dataclass(frozen=True)
class Foreseen:
    """A plan, and what the engine that was named says of it."""

    plan: Plan | GgufPlan
    calibrates: bool
    asked: Asked
    findings: tuple[Finding, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of the tensor files; exact, but for a GGUF file whose recipe measures."""
        return self.plan.size_bytes

    @property
    def bits_per_weight(self) -> float:
        """Bits written for each number that the model has."""
        return self.plan.bits_per_weight

    @property
    def warnings(self) -> list[str]:
        """Sentences."""
        return told_apart(self.plan.warnings)["warnings"]

    @property
    def notes(self) -> list[str]:
        """Sentences that warn of nothing."""
        return told_apart(self.plan.warnings)["notes"]

    def json(self) -> dict[str, Any]:
        """The --json object."""
        if self.asked.engine is None:
            return self.plan.json()
        said = {"engine": self.asked.engine, "tp": self.asked.tp}
        return self.plan.json() | said | {"findings": [one.json() for one in self.findings]}


def foresee(asked: Asked) -> Foreseen:
    """What the recipe will make of the model, before any of it is done."""
    from qtool.recipe.recipe import Recipe, calibration_sets, load

    if asked.engine is not None:
        from qtool.verification.engines.rules import check_engine

        check_engine(asked.engine, asked.tp)
    sets = calibration_sets(asked.calibration, asked.samples, asked.length, None)
    loaded = load(asked.recipe, [*asked.sets, *sets])
    if isinstance(loaded, Recipe):
        found = _of_safetensors(asked, loaded)
    else:
        found = _of_gguf(asked, loaded)
    unusable = _unusable(loaded.calibration, asked.calibration) if found.calibrates else None
    if unusable is None:
        return found
    plan = found.plan  # of either kind
    return replace(found, plan=replace(plan, warnings=(*plan.warnings, unusable)))


def _of_safetensors(asked: Asked, recipe: Recipe) -> Foreseen:
    from qtool.checkpoints.gguf_models import is_gguf
    from qtool.converting.source import check_needed
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import resolve
    from qtool.planning.notes import unread
    from qtool.quantizing.quantize import refuse

    refuse(recipe, "makes no GGUF file", {"--imatrix": asked.imatrix})
    # Before a download that may take hours.
    shard_bytes = parse_size(asked.max_shard_size or "5GB", "--max-shard-size")
    source = resolve(asked.model)
    said: tuple[str, ...] = ()
    if is_gguf(source):
        from qtool.gguf.to_hf.checkpoint_headers import checkpoint_headers

        with checkpoint_headers(source, requantize=asked.requantize) as (folder, said):
            plan, findings = _planned(asked, recipe, folder, shard_bytes)
    else:
        check_needed(source, asked.requantize)
        plan, findings = _planned(asked, recipe, source, shard_bytes)
    plan = replace(plan, warnings=(*said, *plan.warnings, *unread(recipe)))
    return Foreseen(plan, recipe.calibrates, asked, tuple(findings))


def _planned(
    asked: Asked, recipe: Recipe, folder: Path, shard_bytes: int
) -> tuple[Plan, list[Finding]]:
    """And what the engine says that is asked."""
    from qtool.converting.source import opened
    from qtool.planning.experts import as_quantized
    from qtool.planning.plan import make_plan

    checkpoint = as_quantized(recipe, opened(folder, asked.requantize))
    threads, max_ram = asked.threads, asked.max_ram
    plan = make_plan(recipe, checkpoint, shard_bytes, threads=threads, max_ram=max_ram)
    if asked.engine is None:
        return plan, []
    from qtool.cards.planned_view import expected, planned_view
    from qtool.planning.engines import besides
    from qtool.verification.engines.modules import class_modules
    from qtool.verification.engines.rules import view_findings

    config = checkpoint.config
    view, modules = planned_view(plan, config, expected(plan, config)), None
    if asked.engine == "transformers":
        modules = class_modules(checkpoint, view)
    unasked = besides(recipe, plan.tensors, config, asked.engine)
    plan = replace(plan, warnings=tuple(one for one in plan.warnings if one not in unasked))
    return plan, view_findings(view, asked.engine, asked.tp, modules)


def _of_gguf(asked: Asked, recipe: GgufRecipe) -> Foreseen:
    from qtool.gguf.from_hf.source import hf_source
    from qtool.gguf.importance.imatrix import read_importance
    from qtool.gguf.open import open_source, open_view
    from qtool.hub import public_name, resolve
    from qtool.planning.gguf.plan import make_gguf_plan
    from qtool.quantizing.quantize import reads_text, refuse

    refuse(recipe, "makes one GGUF file", {"--max-shard-size": asked.max_shard_size})
    given = {
        "--calibration": asked.calibration,
        "--samples": asked.samples,
        "--length": asked.length,
    }
    named = [name for name, one in given.items() if one is not None]
    calibrates = reads_text(recipe, asked.imatrix, named)
    path = resolve(asked.model)
    view = open_view(path, recipe, asked.imatrix, asked.requantize)
    importance = None if asked.imatrix is None else read_importance(asked.imatrix)
    plan = make_gguf_plan(
        recipe,
        open_source(path, asked.requantize) if view is None else hf_source(view),
        importance,
        requantize=asked.requantize,
        origin=public_name(asked.model, path),
        threads=asked.threads,
        max_ram=asked.max_ram,
    )
    findings: list[Finding] = []
    if asked.engine is not None:
        from qtool.verification.engines.rules import type_findings

        types = {tensor.name: tensor.type for tensor in plan.tensors}
        architecture = str(plan.metadata["general.architecture"].value)
        findings = type_findings(architecture, types, asked.engine, asked.tp)
    return Foreseen(plan, calibrates, asked, tuple(findings))


def _unusable(text: Calibration, named: str | None) -> str | None:
    """What a run will fail for: no plan looks at the text. SourceError where that is named on the
    command line, and of no use; a recipe's may be replaced."""
    from qtool.messages.remarks import NOTE
    from qtool.texts.mixture import check_source, mixture, too_few_bytes
    from qtool.texts.source import on_hub

    try:
        check_source(text.source)
    except (SourceError, UnsupportedError) as error:
        if named is not None:
            raise
        return f"calibration.source: {error}; `qtool quantize` fails on it, unless given another"
    if elsewhere := [part.source for part in mixture(text.source).parts if on_hub(part.source)]:
        return (
            f"{NOTE}the calibration text ({', '.join(map(str, elsewhere))}) is no file here, and a "
            "plan looks at no dataset of the hub"
        )
    found = too_few_bytes(text.source, text.samples * text.length)
    if found is None:
        return None
    return (
        f"the calibration text ({text.source}) has {found:,} bytes, too few for {text.samples} "
        f"samples of {text.length} tokens; `qtool quantize` fails on it: give a longer text, or "
        "fewer or shorter samples (--samples, --length)"
    )
