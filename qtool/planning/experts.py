"""The checkpoint as a recipe has it: intermediate widths padded, and fused experts apart where it
quantizes a matrix of them."""

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import apart
from qtool.checkpoints.padding import padded
from qtool.checkpoints.roles import roles_of
from qtool.formats import mxfp4
from qtool.formats.layer_names import experts_of
from qtool.planning.fit import by_role, fit, override
from qtool.recipe.recipe import Recipe
from qtool.scheme import Scheme


def as_quantized(recipe: Recipe, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a matrix for each expert wherever `recipe` quantizes one of them.

    Layers that stay dense stay fused, as engines know them from the source.
    """
    interleaved = recipe.format == mxfp4.NAME
    view = apart(checkpoint, interleaved=interleaved)
    if view is checkpoint or recipe.rounding == "none":
        return padded(checkpoint, recipe.pad_intermediate)
    view = padded(view, recipe.pad_intermediate)
    tensors = view.tensors
    blocks = structure.find_blocks(tensors, view.config)
    actions = by_role(recipe, roles_of(tensors, blocks))
    override(recipe, actions)
    fit(recipe, tensors, actions)
    found = (experts_of(name) for name, action in actions.items() if isinstance(action, Scheme))
    layers = {layer for layer, _ in filter(None, found)}
    view = apart(checkpoint, layers.__contains__, interleaved)
    return padded(view, recipe.pad_intermediate)
