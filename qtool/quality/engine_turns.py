"""What an engine rotates while it runs an artifact: transform_config, resolved to its tensors."""

from collections.abc import Mapping

from qtool.artifact import Artifact, quantization_config
from qtool.calibrating.online import Online
from qtool.errors import UnsupportedError
from qtool.formats.compressed_tensors_transforms import KEY, Turn, turns
from qtool.formats.safetensors_header import TensorInfo
from qtool.layer_names import number_of
from qtool.plan.cache import attention_of
from qtool.structure import find_blocks


def online_of(artifact: Artifact, tensors: Mapping[str, TensorInfo]) -> Online:
    """UnsupportedError for what is not done here: without it, the weights are another network's."""
    found = Online()
    for turn in turns(quantization_config(artifact.checkpoint)):
        if turn.heads:
            found.heads.update(_heads(artifact, turn, tensors))
        else:
            found.inputs.update(_inputs(artifact, turn))
    return found


def _inputs(artifact: Artifact, turn: Turn) -> dict[str, int]:
    found = {}
    for name, entry in artifact.entries.items():
        if len(entry.shape) != 2 or not name.endswith(".weight") or not turn.means(entry.module):
            continue
        width = entry.shape[-1]
        size = width if turn.size is None else turn.size
        if width % size or size & (size - 1):
            raise UnsupportedError(
                f"{artifact.checkpoint.path}: {KEY}'s {turn.name} rotates inputs of {name}, "
                f"{width} wide, by a Hadamard matrix of {size}; expected a power of two that "
                "divides the width"
            )
        found[name] = size
    if not found:
        raise _none(artifact, turn)
    return found


def _heads(artifact: Artifact, turn: Turn, tensors: Mapping[str, TensorInfo]) -> dict[int, int]:
    assert turn.size is not None
    config = artifact.checkpoint.config
    names = [name for name in tensors if name.endswith(".weight")]
    start = f"{find_blocks(tensors, config).prefix}."
    found = {}
    for name, kept in attention_of(names, config, False).items():
        block = number_of(name.removeprefix(start).split(".", 1)[0])
        if name.startswith(start) and block is not None and turn.means(kept.attention):
            found[block] = turn.size
    if not found:
        raise _none(artifact, turn)
    return found


def _none(artifact: Artifact, turn: Turn) -> UnsupportedError:
    return UnsupportedError(
        f"{artifact.checkpoint.path}: {KEY}'s {turn.name} names no "
        f"{'attention' if turn.heads else 'matrix'} of this model ({', '.join(turn.targets)!r:.80})"
    )
