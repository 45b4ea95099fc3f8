"""The head and the token embedding of a checkpoint, where a recipe quantizes them.

Their bits are in MLX's format those of the recipe's `mlx` table, under its two keys; elsewhere a
head is quantized by an override alone, which may leave its bits open.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.layer_names import is_head
from qtool.gradients.sensitivity import Sensitivities, Sensitivity
from qtool.planned import Planned
from qtool.planning import heads
from qtool.planning.plan import Plan
from qtool.recipe.recipe import Recipe
from qtool.scheme import Dropped

KEYS = ("embedding", "head")  # of MlxOptions

# What GPTQ or AWQ, and what both leave of the KL divergence by rounding to nearest: 0.22 to 0.29,
# and 0.15 to 0.16, of SmolLM2 at 3 and 4 bits in groups of 128 (README.md). An embedding is rounded
# to nearest, so that without these it would get too few bits beside blocks.
_BY_ONE, _BY_BOTH = 1 / 4, 1 / 6


def kept_keys(recipe: Recipe, own: bool, sets: Sequence[str]) -> frozenset[str]:
    """Keys of the `mlx` table that say what is not to be changed: those that a user's own recipe
    has, or a `--set`. own: it is none of the shipped ones, in which they are but where to begin."""
    named = {item.partition("=")[0].strip() for item in sets}
    given = {key for key in KEYS if {"mlx", f"mlx.{key}"} & named}
    return frozenset(given | (recipe.mlx.model_fields_set if own else set()))


def of_width(recipe: Recipe, width: int, kept: Collection[str]) -> Recipe:
    """With so many bits for all that is quantized and that it does not say otherwise of."""
    assert recipe.weights is not None
    weights = recipe.weights.model_copy(update={"bits": width})
    table = {key: width for key in KEYS if getattr(recipe.mlx, key) is not None and key not in kept}
    mlx = recipe.mlx.model_copy(update=table)
    return recipe.model_copy(update={"weights": weights, "mlx": mlx})


def has_no_head(checkpoint: Checkpoint, plan: Plan) -> bool:
    """Whether the embedding is the head, as config.json says or for want of another tensor."""
    own = (t for t in plan.tensors if t.block is None and is_head(t.module))
    return heads.says_tied(checkpoint.config) or all(isinstance(t.action, Dropped) for t in own)


def key_of(planned: Planned, tied: bool) -> str | None:
    """Of the `mlx` table, which says its bits. tied: config.json says that the embedding is the
    head."""
    if planned.block is not None:
        return None
    if is_head(planned.module):
        return "head"
    if not heads.of_tokens(planned.name):
        return None
    return "head" if tied else "embedding"


def sensitivities_of(
    planned: Planned, sensitivities: Sensitivities, headless: bool
) -> list[Sensitivity]:
    """Of each way in which the network reads a matrix, an embedding that is the head in two; none
    where something was not measured. headless: no other tensor is the head."""
    if planned.block is not None:
        found = [sensitivities.matrices.get(planned.name, {}).get(-1)]
    elif is_head(planned.module):
        found = [sensitivities.head]
    else:
        found = [
            sensitivities.tables.get(planned.name),
            *([sensitivities.head] if headless else []),
        ]
    known = [one for one in found if one is not None and _fits(one, planned)]
    return known if len(known) == len(found) else []


def _fits(sensitivity: Sensitivity, planned: Planned) -> bool:
    return (sensitivity.rows.size, sensitivity.columns.size) == planned.shape


def remains(recipe: Recipe, planned: Planned) -> float:
    """Of what rounding a matrix to nearest loses, what remains by the recipe's methods."""
    if planned.block is None:
        swept = recipe.rounding == "gptq" and is_head(planned.module)
        return _BY_ONE if swept else 1.0
    methods = (recipe.rounding == "gptq") + ("awq" in recipe.transform_chain)
    return (1.0, _BY_ONE, _BY_BOTH)[methods]


def table(recipe: Recipe, keys: Mapping[str, str], bits: Mapping[str, str]) -> dict[str, Any]:
    """`mlx:` as a recipe is to have it. keys: of units; bits: of all units."""
    chosen = {key: int(bits[unit]) for unit, key in keys.items() if unit in bits}
    said = recipe.model_dump(mode="json", exclude_unset=True).get("mlx", {})
    return {"mlx": said | chosen} if chosen else {}
