"""Rotating the source of a run: the proof, and learned rotations kept for a run that goes on.

`rotations` in the workspace holds the learned matrices, float64, R1 first and then R2 by block;
the journal has their sizes and the checksum.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qtool.messages.progress import Progress
from qtool.native.sums import checksum
from qtool.planning.plan import Plan
from qtool.runs.request import Request
from qtool.transforms import rotate, rotation
from qtool.transforms.residual import NotRotatableError
from qtool.transforms.rotated import Rotated
from qtool.transforms.rotations import Rotations
from qtool.workspaces.workspace import Workspace

UNIT = "learned rotations"


def rotate_source(
    request: Request, plan: Plan, view: Rotated, space: Workspace, progress: Progress
) -> Rotations:
    """Find the rotations, prove them, learn them where the recipe says so, and let the view show
    what they make of the network."""
    recipe = request.recipe
    with progress.stage("transform"):
        found = rotate.prepare(view, recipe.rotate, progress.say)
    if not recipe.learns_rotations or (found.r1 is None and not found.r2):
        return found
    kept = _take_up(space, found)
    if kept is None:
        from qtool.texts.calibration import calibration_tokens
        from qtool.transforms import learned

        with progress.stage("transform"):
            tokens = calibration_tokens(recipe.calibration, view.folder, progress).tokens
            samples = -(-learned.TOKENS // tokens.shape[1])
            schemes = {
                tensor.name: scheme
                for tensor in plan.tensors
                if tensor.name in view.changes and (scheme := plan.target(tensor.name)) is not None
            }
            options = recipe.rotate
            progress.say(f"learning the rotations: {options.steps} steps")
            kept = learned.learn(
                view, found, schemes, tokens[:samples], options.steps, options.rate, progress,
                recipe.activations,
            )  # fmt: skip
        _keep(space, kept)
    with progress.stage("transform"):
        return _proved(view, kept, found, progress)


def _proved(view: Rotated, learned: Rotations, start: Rotations, progress: Progress) -> Rotations:
    """What was learned, if the network is still itself; else what learning began with."""
    try:
        rotate.prove_whole(view, learned)
    except NotRotatableError as why:
        reason = f"what was learned is left out: {why}"
        progress.say(f"note: rotate: {reason}")
        start = replace(start, left_out=(*start.left_out, reason))
        start.apply(view)
        return start
    return learned


def _keep(space: Workspace, found: Rotations) -> None:
    matrices = [r.dense() for r in (found.r1, *found.r2.values()) if r is not None]
    values = np.concatenate([matrix.reshape(-1) for matrix in matrices])
    (space.folder / "rotations").write_bytes(values.view(np.uint8).data)
    space.journal.commit(
        UNIT,
        r1=None if found.r1 is None else found.r1.size,
        r2=[[index, r.size] for index, r in found.r2.items()],
        sums=checksum(values.view(np.uint8)),
        learned=found.learned,
    )


def _take_up(space: Workspace, found: Rotations) -> Rotations | None:
    """What an earlier run learned, where the file has what the journal says."""
    entry: Mapping[str, Any] | None = space.journal.done.get(UNIT)
    if entry is None:
        return None
    path = space.folder / "rotations"
    values = np.fromfile(path, np.float64) if path.is_file() else np.empty(0)
    sizes = [r.size for r in (found.r1, *found.r2.values()) if r is not None]
    whole = values.size == sum(size * size for size in sizes)
    same = entry.get("r2") == [[index, r.size] for index, r in found.r2.items()]
    if not whole or not same or checksum(values.view(np.uint8)) != entry.get("sums"):
        space.journal.forget_from(UNIT)
        return None
    parts = np.split(values, np.cumsum([size * size for size in sizes])[:-1])
    matrices = [
        rotation.learned(part.reshape(size, size)) for part, size in zip(parts, sizes, strict=True)
    ]
    r1 = matrices.pop(0) if found.r1 is not None else None
    r2 = dict(zip(found.r2, matrices, strict=True))
    return replace(found, r1=r1, r2=r2, learned=str(entry.get("learned")))
