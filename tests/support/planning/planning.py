"""Plans of models that are headers alone."""

from pathlib import Path
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.planning.plan import Plan, make_plan
from qtool.recipe.recipe import load
from support.models import header_files


def plan_of(
    folder: Path, shapes: header_files.Shapes, recipe: str, *sets: str, **config: Any
) -> Plan:
    header_files.write(folder, shapes, config)
    return make_plan(load(recipe, sets), Checkpoint.open(folder))


def quantized(plan: Plan) -> set[str]:
    return {tensor.module for tensor in plan.quantized}
