"""Reading a matrix of a compressed-tensors artifact."""

from pathlib import Path

from qtool.artifacts.artifact import Artifact
from qtool.scheme import GroupQuant

M = "model.layers.0.mlp.up_proj"


MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


def read(folder: Path, name: str = M) -> GroupQuant:
    found = Artifact.open(folder).read(name)
    assert isinstance(found, GroupQuant)
    entry = Artifact.open(folder).entry(name)
    assert (entry.scheme, entry.shape) == (found.scheme, found.shape)
    return found
