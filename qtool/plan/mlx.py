"""Experts in MLX's format: mlx-lm stacks them, and quantized ones of some models only."""

from collections.abc import Sequence

from qtool.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.plan.planned import Planned
from qtool.recipe.recipe import Recipe
from qtool.structure import expert_of
from qtool.verification.engine_mlx import stacked_apart


def refuse_experts(recipe: Recipe, checkpoint: Checkpoint, tensors: Sequence[Planned]) -> None:
    """UnsupportedError where mlx-lm would not load the experts that a plan quantizes."""
    if recipe.format != "mlx":
        return
    experts = [t for t in tensors if t.scheme is not None and expert_of(t.name) is not None]
    kind = str(checkpoint.config.get("model_type") or "")
    if experts and stacked_apart(kind):
        raise UnsupportedError(
            f"{checkpoint.path}: {experts[0].module} and {len(experts) - 1} more are experts, "
            f"which format mlx stores one by one, and mlx-lm does not stack quantized ones of "
            f"{kind or 'a model without model_type'}; take a GGUF recipe, or leave them dense: "
            "--set 'overrides=[{match: \"*.experts.*\", dense: true}]'"
        )
