"""What becomes of every source tensor: quantized under a scheme, dense, or dropped, each for a
stated reason."""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import chain

import numpy as np

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import matrices
from qtool.checkpoints.roles import Role
from qtool.errors import UnsupportedError
from qtool.planning import heads, mlx, mxfp4, notes, unmatched
from qtool.planning.fit import by_role, fit, override
from qtool.recipe.recipe import Recipe
from qtool.scheme import Action, Dense, Dropped, Scheme

_COMPARED_BYTES = 1 << 20  # at a time, and at each end where only a sample is compared


def decided(
    recipe: Recipe,
    checkpoint: Checkpoint,
    roles: Mapping[str, Role],
    unknown: Collection[str],
    compare_all: bool,
) -> tuple[dict[str, Action], list[str]]:
    """The action of every tensor, and warnings. The arguments are make_plan's, which says what is
    raised; roles: of all tensors."""
    tensors = checkpoint.tensors
    actions = by_role(recipe, roles)
    says_tied = heads.says_tied(checkpoint.config)
    heads.refuse_tied(recipe, tensors, says_tied)
    fused = matrices(tensors, interleaved=recipe.format == "mxfp4")
    unmatched.refuse(recipe, [*actions, *chain.from_iterable(fused.values())])
    kind = str(checkpoint.config.get("model_type") or "")
    mlx.leave(recipe, kind, actions)
    mxfp4.leave(recipe, actions)
    untied = _untie(checkpoint, actions, compare_all)  # before MLX has the embedding quantized
    actions |= {name: one for name, one in untied.items() if isinstance(one, Dropped)}
    heads.quantize_outside(recipe, actions, kind, says_tied and not heads.has_own(actions))
    warnings = override(recipe, actions, fused, {name for name, role in roles.items() if role.mtp})
    no_place: Action = Dense("unknown to the model class")
    actions |= {n: no_place for n in unknown if isinstance(actions[n], Scheme)}
    fit(recipe, tensors, actions)
    if recipe.tunes:
        names = (name for name, action in actions.items() if isinstance(action, Scheme))
        experts = (name for name in names if structure.expert_of(name) is not None)
        notes.refuse_experts(checkpoint.path, experts)
    actions |= {name: one for name, one in untied.items() if actions[name] == heads.HEAD}
    if says_tied and heads.has_own(actions):
        warnings.append(heads.SAID_UNTIED)
    if recipe.rounding != "none":
        _refuse_none(recipe, checkpoint, actions)
    return actions, warnings


def _refuse_none(recipe: Recipe, checkpoint: Checkpoint, actions: Mapping[str, Action]) -> None:
    if any(isinstance(action, Scheme) for action in actions.values()):
        return
    reasons = Counter(a.reason for a in actions.values() if isinstance(a, Dense))
    common = "; ".join(f"{why}: {count}" for why, count in reasons.most_common(4))
    raise UnsupportedError(
        f"{checkpoint.path}: with recipe {recipe.name} no tensor is quantized (tensors by "
        f"reason: {common}); correct the recipe: `qtool inspect MODEL --all` shows the tensors"
    )


def _untie(
    checkpoint: Checkpoint, actions: Mapping[str, Action], compare_all: bool
) -> dict[str, Action]:
    """What a head that config.json ties to the embedding becomes: one copy is enough."""
    found = [name for name, action in actions.items() if action == heads.HEAD]
    if not heads.says_tied(checkpoint.config) or len(found) != 1:
        return {}
    head = found[0]
    info = checkpoint.tensors[head]
    for name, action in actions.items():
        other = checkpoint.tensors[name]
        if (
            isinstance(action, Dense)
            and action.reason == "embedding"
            and (other.shape, other.dtype) == (info.shape, info.dtype)
        ):
            if _equal_bytes(checkpoint, head, name, compare_all):
                return {head: Dropped(f"tied to {name}, of which it is a copy")}
            return {head: Dense(f"output head; config.json ties it to {name}, but it differs")}
    return {}


def _equal_bytes(checkpoint: Checkpoint, first: str, second: str, every: bool) -> bool:
    """Whether two tensors of one size hold the same bytes: at both ends, or `every` one."""
    size = checkpoint.tensors[first].nbytes
    starts = range(0, size, _COMPARED_BYTES)
    if not every and len(starts) > 2:
        starts = range(0, size, size - _COMPARED_BYTES)[:2]
    for start in starts:
        stop = min(size, start + _COMPARED_BYTES)
        one, other = (checkpoint.stretch(name, start, stop) for name in (first, second))
        if not np.array_equal(one, other):
            return False
    return True
