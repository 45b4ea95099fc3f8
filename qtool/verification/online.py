"""Rotations that engines compute (transform_config): that they can be done, and are those made.

Weights that hold R4 are another network's without it. What was made is told by qtool.json.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from qtool.artifacts.stored_config import quantization_config
from qtool.errors import UnsupportedError
from qtool.formats.compressed_tensors_transforms import KEY, online_rotations
from qtool.verification.config import conversions
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "online-rotation"
_WHAT = {"r3": "queries and keys", "r4": "inputs of the MLP's last matrices"}


def check_online(subject: Subject) -> Iterator[Finding]:
    """online-rotation: transform_config and qtool.json speak of the same rotations.

    QtoolError, as of `qtool eval`, for a rotation that is not done here, of qtool's own artifacts;
    other tools' may well have one.
    """
    artifact = subject.artifact
    if artifact.found.format == "dense":
        return
    record = artifact.provenance or {}
    try:
        stated = _stated(subject)
    except UnsupportedError as problem:
        if isinstance(record.get("recipe"), Mapping):
            raise
        words = f"{problem}: what the weights stand for was not checked"
        yield Finding("note", CHECK, "config.json", words)
        return
    # What was converted has lost them on purpose; what another tool made says nothing of them.
    if not isinstance(record.get("recipe"), Mapping) or conversions(subject):
        return
    made = record.get("rotation")
    for which, what in _WHAT.items():
        wanted = made.get(which) if isinstance(made, Mapping) else None
        if wanted != stated[which]:
            yield Finding(
                "error", CHECK, "qtool.json",
                f"qtool.json says that the weights were made for {what} rotated by "
                f"{str(wanted or 'nothing')[:80]} while the model runs ({which.upper()}), "
                f"config.json's {KEY} says {stated[which] or 'nothing'}; make the artifact again",
            )  # fmt: skip


def _stated(subject: Subject) -> dict[str, Any]:
    """Sizes of R3 and R4 as the config has them, in the words of qtool.json."""
    if not online_rotations(quantization_config(subject.artifact.checkpoint)):
        return dict.fromkeys(_WHAT)
    # They need torch, which a look at an artifact without rotations does not.
    from qtool.quality.engine_rotations import online_of
    from qtool.transforms.rotations import sizes

    found = online_of(subject.artifact, subject.infos)
    return {"r3": sizes(found.heads), "r4": sizes(found.inputs)}
