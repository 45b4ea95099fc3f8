"""The source of a rotated artifact, rotated in the same way, so that weights can be compared.

What was done is told by qtool.json: kind, seed and which rotations. Learned ones are not kept, so
that weights made with them cannot be compared with any others.
"""

from collections.abc import Mapping
from typing import Any

from qtool.artifact import Artifact
from qtool.calibrating.weights import Weights
from qtool.checkpoint import Checkpoint
from qtool.errors import QtoolError
from qtool.verification.finding import Finding

CHECK = "rotation"
_KINDS = ("r1", "r2", "r3", "r4")


def as_rotated(artifact: Artifact, source: Weights) -> tuple[Weights | None, list[Finding]]:
    """What the artifact's weights are to be compared with, None where there is nothing."""
    record = (artifact.provenance or {}).get("rotation")
    if not isinstance(record, Mapping) or not any(map(record.get, _KINDS)):
        return source, []
    kind, seed = record.get("kind"), record.get("seed")
    if kind == "learned":
        return None, [_note("by what was learned, and is not kept: its weights are not")]
    if kind not in ("hadamard", "random") or type(seed) is not int or not 0 <= seed < 2**32:
        return None, [_note("in a way that qtool.json does not say: its weights are not")]
    if not isinstance(source, Checkpoint):
        return None, [_note("and the model given is no checkpoint of safetensors: they are not")]
    from qtool.recipe.rotate import RotateOptions
    from qtool.transforms import rotate
    from qtool.transforms.rotated import untied

    asked = {which: bool(record.get(which)) for which in _KINDS}
    options = RotateOptions(kind=kind, seed=seed, **asked)
    try:
        view = untied(source, stream=options.r1)
        found = rotate.prepare(view, options, lambda _: None)
    except QtoolError as problem:
        return None, [Finding("error", CHECK, "", f"the source cannot be rotated: {problem}")]
    said: dict[str, Any] = found.record(options)
    if any(said[which] != record.get(which) for which in _KINDS):
        return None, [_note("as the model given cannot be: they are not")]
    return view, [
        Finding("note", CHECK, "", "compared with the source rotated as qtool.json says it was")
    ]


def _note(why: str) -> Finding:
    return Finding("note", CHECK, "", f"the model was rotated {why} compared with the source's")
