"""gpt-oss's own format has MXFP4 of experts alone, and of all of them."""

from collections.abc import Sequence

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import DOWN, GATE_UP
from qtool.checkpoints.structure import expert_of
from qtool.errors import SourceError, UnsupportedError
from qtool.formats import mxfp4
from qtool.planned import Planned
from qtool.recipe.recipe import Recipe
from qtool.scheme import Action, Dense, Scheme

_ALONE = "format mxfp4 has experts alone in 4 bits"


def refuse_others(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """UnsupportedError for a model whose classes no engine has the format for."""
    kind = str(checkpoint.config.get("model_type") or "")
    if recipe.format == mxfp4.NAME and not checkpoint.config:
        raise SourceError(
            f"{checkpoint.folder}: has no config.json, which says what model it is; put the "
            "model's own beside its tensors"
        )
    if recipe.format == mxfp4.NAME and kind != mxfp4.MODEL:
        raise UnsupportedError(
            f"{checkpoint.path}: format mxfp4 is gpt-oss's own (model_type {mxfp4.MODEL}), which "
            f"engines do not load of {kind or 'a model without model_type'}; recipe mxfp4 writes "
            "MXFP4 as compressed-tensors, and mxfp4_moe as GGUF"
        )


def refuse_incomplete(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """SourceError where experts are not what transformers saves of gpt-oss, in two tensors with
    biases."""
    if recipe.format != mxfp4.NAME:
        return
    tensors = checkpoint.tensors
    fused = [n for n in tensors if n.endswith((f"experts.{GATE_UP}", f"experts.{DOWN}"))]
    if alone := [name for name in fused if f"{name}_bias" not in tensors]:
        raise SourceError(
            f"{checkpoint.path}: lacks {alone[0]}_bias, which gpt-oss has; fetch it again"
        )
    if not fused and not any(name.endswith(f".{GATE_UP}.weight") for name in tensors):
        raise SourceError(
            f"{checkpoint.path}: no tensor is called ...mlp.experts.{GATE_UP} [experts, in, 2 * "
            "inner], as transformers saves gpt-oss's experts, each with a bias; save it so"
        )


def leave(recipe: Recipe, actions: dict[str, Action]) -> None:
    """Make dense what is no expert's."""
    if recipe.format != mxfp4.NAME:
        return
    for name, action in actions.items():
        if isinstance(action, Scheme) and expert_of(name) is None:
            actions[name] = Dense(_ALONE)


def refuse(recipe: Recipe, checkpoint: Checkpoint, tensors: Sequence[Planned]) -> None:
    """UnsupportedError where some experts stay dense: engines take all of them for codes."""
    if recipe.format != mxfp4.NAME:
        return
    fused = [tensor for tensor in tensors if tensor.fused]
    left = fused or [
        tensor for tensor in tensors if tensor.scheme is None and expert_of(tensor.name) is not None
    ]
    if left:
        raise UnsupportedError(
            f"{checkpoint.path}: {left[0].module} and {len(left) - 1} more would stay dense "
            f"({left[0].reason}), and engines load gpt-oss with all of its experts in MXFP4 or "
            "none: take back the override that leaves them out"
        )
