"""What mlx-lm has otherwise than checkpoints: experts stacked, and latent attention taken apart."""

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.structure import expert_of
from qtool.errors import UnsupportedError
from qtool.formats import mxfp4
from qtool.formats.mlx_experts import STACKED, stack_of
from qtool.formats.mlx_models import refused, takes_experts
from qtool.formats.safetensors_layout import StackOf
from qtool.planned import Planned
from qtool.recipe.recipe import Recipe
from qtool.scheme import Action, Dense, Scheme


def stacks(format_: str, config: Mapping[str, Any]) -> StackOf | None:
    """How a format stores experts together, where it does."""
    if format_ == mxfp4.NAME:
        return mxfp4.stack_of
    return stack_of if format_ == "mlx" and config.get("model_type") in STACKED else None


def leave(recipe: Recipe, kind: str, actions: dict[str, Action]) -> None:
    """Make dense what mlx-lm takes apart as it loads, and would round once more: the keys and
    values of latent attention (DeepSeek); and what it renames only where it is dense: layers
    without experts of LFM2-MoE. kind: model_type."""
    if recipe.format != "mlx":
        return
    for name, action in actions.items():
        if isinstance(action, Scheme) and name.endswith(".kv_b_proj.weight"):
            actions[name] = Dense("mlx-lm takes it apart as it loads")
        plain = ".feed_forward.w" in name and kind == "lfm2_moe"
        if isinstance(action, Scheme) and plain:
            actions[name] = Dense("mlx-lm renames it as it loads, and its scales not")


def refuse(recipe: Recipe, checkpoint: Checkpoint, tensors: Sequence[Planned]) -> None:
    """UnsupportedError where mlx-lm would not load what a plan quantizes."""
    if recipe.format != "mlx":
        return
    experts = [t for t in tensors if t.scheme is not None and expert_of(t.name) is not None]
    kind = str(checkpoint.config.get("model_type") or "")
    if any(t.scheme is not None for t in tensors) and (why := refused(kind)) is not None:
        raise UnsupportedError(
            f"{checkpoint.path}: mlx-lm has no quantized {kind}: {why}; take a GGUF recipe"
        )
    if experts and not takes_experts(kind):
        raise UnsupportedError(
            f"{checkpoint.path}: {experts[0].module} and {len(experts) - 1} more are experts, "
            f"of which it is not known how mlx-lm has quantized ones of "
            f"{kind or 'a model without model_type'}; take a GGUF recipe, or leave them dense: "
            "--set 'overrides=[{match: \"*.experts.*\", dense: true}]'"
        )
