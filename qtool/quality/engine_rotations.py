"""What an engine rotates while it runs an artifact: transform_config, resolved to its tensors."""

from collections.abc import Mapping
from typing import TypeVar

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.cache_scales import attention_of
from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.roles import outside_reason
from qtool.checkpoints.structure import find_blocks
from qtool.errors import UnsupportedError
from qtool.formats.compressed_tensors_transforms import KEY, OnlineRotation, online_rotations
from qtool.formats.layer_names import number_of
from qtool.formats.safetensors_header import TensorInfo
from qtool.streaming.online import Online

T = TypeVar("T", int, str)
_TIED = "lm_head"  # has no tensor of its own


def online_of(artifact: Artifact, tensors: Mapping[str, TensorInfo]) -> Online:
    """UnsupportedError for what is not done here: without it, the weights are another network's."""
    found = Online()
    for rotation in online_rotations(quantization_config(artifact.checkpoint)):
        if rotation.heads:
            _add(artifact, rotation, found.heads, _heads(artifact, rotation, tensors))
        else:
            _add(artifact, rotation, found.inputs, _inputs(artifact, rotation, tensors))
    return found


def _add(
    artifact: Artifact, rotation: OnlineRotation, known: dict[T, int], more: Mapping[T, int]
) -> None:
    """Of two rotations of one input engines do the last one, or both: neither is done here."""
    twice = sorted(map(str, known.keys() & more.keys()))
    if twice:
        what = f"attention of block {twice[0]}" if rotation.heads else twice[0]
        raise UnsupportedError(
            f"{artifact.checkpoint.path}: {KEY}'s {rotation.name} rotates {what} once more; one "
            "rotation of a matrix is done here"
        )
    known.update(more)


def _inputs(
    artifact: Artifact, rotation: OnlineRotation, tensors: Mapping[str, TensorInfo]
) -> dict[str, int]:
    start = f"{find_blocks(tensors, artifact.checkpoint.config).prefix}."
    found = {}
    outside = []
    if not any(outside_reason(name) == "output head" for name in tensors) and rotation.means(_TIED):
        outside.append(_TIED)
    for name, entry in artifact.entries.items():
        if len(entry.shape) != 2 or not name.endswith(".weight"):
            continue
        table = outside_reason(name) == "embedding"  # which is no linear layer
        if not (rotation.names(entry.module) if table else rotation.means(entry.module)):
            continue
        if not name.startswith(start):
            outside.append(name)
            continue
        width = entry.shape[-1]
        size = width if rotation.size is None else rotation.size
        if width % size or size & (size - 1):
            raise UnsupportedError(
                f"{artifact.checkpoint.path}: {KEY}'s {rotation.name} rotates inputs of {name}, "
                f"{width} wide, by a Hadamard matrix of {size}; expected a power of two that "
                "divides the width"
            )
        found[name] = size
    if outside:
        raise UnsupportedError(
            f"{artifact.checkpoint.path}: {KEY}'s {rotation.name} rotates inputs of {outside[0]}, "
            "which is outside of the decoder's blocks; that is not done here, and without its "
            "rotation the model is another one"
        )
    if not found:
        raise _none(artifact, rotation)
    return found


def _heads(
    artifact: Artifact, rotation: OnlineRotation, tensors: Mapping[str, TensorInfo]
) -> dict[int, int]:
    assert rotation.size is not None
    config = artifact.checkpoint.config
    names = [name for name in tensors if name.endswith(".weight")]
    start = f"{find_blocks(tensors, config).prefix}."
    found = {}
    for name, kept in attention_of(names, config, False).items():
        block = number_of(name.removeprefix(start).split(".", 1)[0])
        if name.startswith(start) and block is not None and rotation.means(kept.attention):
            found[block] = rotation.size
    if not found:
        raise _none(artifact, rotation)
    return found


def _none(artifact: Artifact, rotation: OnlineRotation) -> UnsupportedError:
    return UnsupportedError(
        f"{artifact.checkpoint.path}: {KEY}'s {rotation.name} names no "
        f"{'attention' if rotation.heads else 'matrix'} of this model "
        f"({', '.join(rotation.targets)!r:.80})"
    )
